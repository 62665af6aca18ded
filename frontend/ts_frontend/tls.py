"""What the settings say of TLS, for those who listen and those who check before."""

from __future__ import annotations

from ts_frontend.config import ServerConfig
from ts_frontend.config_checks import secured
from ts_frontend.ingress.call import Tls
from ts_frontend.ingress.certificates import read


def certificate_files(config: ServerConfig) -> Tls | None:
    """What TLS addresses use; None: no address does. Both files are set then (config_checks.py)."""
    if not any(secured(config)):
        return None
    client_ca = None if config.client_ca_file is None else str(config.client_ca_file)
    return Tls(str(config.certificate_file), str(config.private_key_file), client_ca, config.certificate_check_s)


def check_certificates(config: ServerConfig) -> None:
    """Now, and not when the models have been loaded. Warnings are for those who listen to say.

    :raises CertificateRefused: a file that is needed can't be used.
    """
    tls = certificate_files(config)
    if tls is not None:
        read(tls)
