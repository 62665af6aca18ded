"""The description and the addresses of the package, and its compiled form, which setup.cfg can't make.

A package index shows the README outside of a checkout. TORCHRELAY_REPOSITORY=https://… (the address of the repository
from which a release is made) turns its links to files into links to that repository, and becomes the project's address.
Without it these links become text.

TORCHRELAY_COMPILE=1 compiles the modules that setup.cfg lists with mypyc. Their sources are installed too: another
version of Python imports those. TORCHRELAY_OPT_LEVEL=0 leaves the C compiler's optimisation out, for tests.
"""

from __future__ import annotations

import atexit
import configparser
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

#: A link or an image whose target is a file of the checkout.
_RELATIVE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_REPOSITORY = os.environ.get("TORCHRELAY_REPOSITORY", "").rstrip("/")
_PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Source": ""}


def _absolute(link: re.Match[str]) -> str:
    image, text, path = link.groups()
    if not _REPOSITORY:
        return text
    return f"{image}[{text}]({_REPOSITORY}/{'raw' if image else 'blob'}/HEAD/{path})"


def _addresses() -> dict[str, str]:
    if not _REPOSITORY:
        return {}
    if not re.fullmatch(r"https://[^\s/]+/\S+", _REPOSITORY):
        sys.exit(f"TORCHRELAY_REPOSITORY={_REPOSITORY}: the address of a repository is needed, https://HOST/OWNER/NAME")
    return {name: f"{_REPOSITORY}/blob/HEAD/{path}" if path else _REPOSITORY for name, path in _PAGES.items()}


# --- the compiled form

#: The library with the code of all compiled modules, to whose name mypyc adds `__mypyc`. It is in the package, so that
#: it is found wherever the package is.
_LIBRARY = "ts.compiled"
#: mypy's options, with which the generated C doesn't depend on other installed packages.
_MYPY = ("--config-file=", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent")


def _settings() -> configparser.ConfigParser:
    found = configparser.ConfigParser(delimiters=("=",))
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


class _Compiler(build_ext):
    """Makes the extensions only when they are built, since mypy isn't installed before that."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            sys.exit("TORCHRELAY_COMPILE=1: an editable install has no compiled form. Use `pip install .`")
        from mypyc.build import mypycify

        folder = Path(self.get_finalized_command("build").build_base).resolve()
        # Tracebacks have the names of files as mypyc was given them: below here, each begins with its package.
        for package in ("worker/ts", "frontend/ts_frontend"):
            (folder / Path(package).name).symlink_to(ROOT / package)
        files = [f"{name.replace('.', '/')}.py" for name in _settings()["torchrelay:compiled"]["modules"].split()]
        os.chdir(folder)
        try:
            self.distribution.ext_modules = mypycify(
                [*_MYPY, *files],
                opt_level=os.environ.get("TORCHRELAY_OPT_LEVEL", "1"),
                debug_level="0",
                target_dir=str(folder / "c"),
                group_name=_LIBRARY,
            )
        finally:
            os.chdir(ROOT)
        for extension in self.distribution.ext_modules:
            # Python's -Wall looks for three quarters of the compiler's time for faults that generated C doesn't have.
            extension.extra_compile_args = [*extension.extra_compile_args, "-Wno-all"]
        self.swig_opts = None  # as before the first time
        self.finalize_options()
        super().run()


def _compiled() -> dict[str, Any]:
    """The arguments of `setup` for the compiled form."""
    if os.environ.get("TORCHRELAY_COMPILE", "0") in ("", "0"):
        return {}
    mypy = next(line for line in _settings()["options.extras_require"]["dev"].splitlines() if line.startswith("mypy "))
    # A folder of its own: nothing of one build gets into another.
    folder = tempfile.mkdtemp(prefix="torchrelay-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {
        "ext_modules": [Extension(f"{_LIBRARY}__mypyc", [])],  # which makes the wheel one for this Python and machine
        "cmdclass": {"build_ext": _Compiler},
        "setup_requires": [mypy],
        "options": {"build": {"build_base": folder}},
    }


setup(
    long_description=_RELATIVE.sub(_absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls=_addresses(),
    **_compiled(),
)
