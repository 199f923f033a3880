"""Draws the pictures of the documentation with the tool itself: `make docs-pictures`."""

import pathlib
import subprocess
import sys

PICTURES = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
COMMANDS = {
    "placement.png": ["verify", "--usual-idiom", "--micro-batches", "1"],
    "plan.png": ["plan", "--micro-batches", "4", "--batch-size", "100"],
    "timeline.png": ["timeline", "--micro-batches", "4", "--batch-size", "100"],
}


def main():
    """Runs one command a picture; the usual idiom's ends with 1, because it has strays."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, words in COMMANDS.items():
        command = [sys.executable, "-m", "tf_mp", *words, "--png", str(PICTURES / name)]
        done = subprocess.run(command, check=False)
        if done.returncode != ("--usual-idiom" in words):
            sys.exit(f"Drawing {name} ended with {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    main()
