"""Builds the archives of model_store/ from examples/.

Usage: python ts_scripts/build_example_archives.py [--check] [--out model_store] [NAME ...]

`--check` writes nothing and fails if an archive differs from its sources. Training is a separate step: the scripts
`examples/*/train.py` write the weights that are packed here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from model_archiver import ModelArchiver, ModelArchiverConfig

ROOT = Path(__file__).resolve().parent.parent
SIZE_BYTES_MAX = 1_000_000
MANIFEST = "MAR-INF/MANIFEST.json"
#: The manifest members about the packing (time, program) rather than the content.
UNCOMPARED = ("createdOn", "archiverVersion")


class Recipe(NamedTuple):
    """One archive: `file` in the model store; the other names are files in `examples/<folder>`."""

    file: str
    folder: str
    name: str
    version: str
    handler: str
    model_file: str | None = None
    serialized_file: str | None = None
    config_file: str | None = None
    extra_files: tuple[str, ...] = ()


RECIPES = (
    Recipe(
        "digits.mar", "digits", "digits", "1.0", "digits_handler.py", "digit_net.py", "digits.pt", "model-config.yaml"
    ),
    Recipe(
        "digits_v2.mar", "digits", "digits", "2.0", "digits_handler.py", None, "digits_scripted.pt", "model-config.yaml"
    ),
    Recipe(
        "text_stream.mar",
        "text_stream",
        "text_stream",
        "1.0",
        "text_stream_handler.py",
        "character_model.py",
        "text_stream.pt",
        "model-config.yaml",
        ("continuation.py",),
    ),
    Recipe("hello_stream.mar", "hello_stream", "hello_stream", "1.0", "hello_stream_handler.py"),
)


def build(recipe: Recipe, out: Path) -> Path:
    """Packs one archive into the folder `out`."""
    folder = ROOT / "examples" / recipe.folder

    def source(name: str | None) -> str | None:
        return None if name is None else str(folder / name)

    with tempfile.TemporaryDirectory() as work:
        ModelArchiver.generate_model_archive(
            ModelArchiverConfig(
                model_name=recipe.name,
                version=recipe.version,
                handler=str(folder / recipe.handler),
                model_file=source(recipe.model_file),
                serialized_file=source(recipe.serialized_file),
                config_file=source(recipe.config_file),
                extra_files=",".join(str(folder / name) for name in recipe.extra_files) or None,
                export_path=work,
            )
        )
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(Path(work) / f"{recipe.name}.mar", out / recipe.file))


def contents(archive: Path) -> dict[str, bytes]:
    """Every file of an archive by its name; the manifest without the fields that change with each packing."""
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}
    manifest = {key: value for key, value in json.loads(files[MANIFEST]).items() if key not in UNCOMPARED}
    files[MANIFEST] = json.dumps(manifest, sort_keys=True).encode()
    return files


def difference(built: Path, kept: Path) -> str:
    """The difference between two archives, "" without one."""
    if not kept.exists():
        return "is missing"
    new, old = contents(built), contents(kept)
    names = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    return f"differs from its sources in {', '.join(names)}" if names else ""


def check(recipe: Recipe, store: Path) -> str:
    """The fault of an archive of the store, "" without one."""
    with tempfile.TemporaryDirectory() as work:
        found = difference(build(recipe, Path(work)), store / recipe.file)
    if not found and (size := (store / recipe.file).stat().st_size) >= SIZE_BYTES_MAX:
        found = f"has {size} bytes, {SIZE_BYTES_MAX} or more"
    return f"{recipe.file} {found}" if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the example archives.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "model_store")
    parser.add_argument("names", nargs="*", metavar="NAME", help="archive files; all by default")
    options = parser.parse_args()
    chosen = [recipe for recipe in RECIPES if not options.names or recipe.file in options.names]
    if options.check:
        problems = [problem for recipe in chosen if (problem := check(recipe, options.out))]
        sys.exit("\n".join([*problems, "Run ts_scripts/build_example_archives.py"]) if problems else 0)
    for recipe in chosen:
        path = build(recipe, options.out)
        print(f"{path}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
