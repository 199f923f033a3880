"""Prints what setup.cfg asks for: its install_requires and the extras named as arguments."""

import configparser
import pathlib
import sys

SETUP_CFG = pathlib.Path(__file__).resolve().parents[2] / "setup.cfg"


def read_requirements(extras, path=SETUP_CFG):
    """The requirement lines of the package and of some of its extras.

    Args:
        extras: names of extras in setup.cfg's `options.extras_require`.
        path: the setup.cfg to read.

    Returns:
        A list of requirement strings, in the order of the file.

    Raises:
        SystemExit: an extra is not in the file.
    """
    config = configparser.ConfigParser(interpolation=None)
    config.read(path, encoding="utf-8")
    known = config["options.extras_require"]
    for extra in extras:
        if extra not in known:
            sys.exit(f"Received extra {extra!r}; {path.name} has: {', '.join(known)}.")
    texts = [config["options"]["install_requires"]] + [known[extra] for extra in extras]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    print("\n".join(read_requirements(sys.argv[1:])))
