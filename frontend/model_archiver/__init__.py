"""The model archiver behind `torch-model-archiver`; Python code imports it as `model_archiver`."""

from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.version import __version__

__all__ = ["ModelArchiver", "ModelArchiverConfig", "ModelArchiverError", "__version__"]
