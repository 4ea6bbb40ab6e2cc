"""`python -m icefloe` is the same as the command `icefloe`."""

from icefloe.cli import run

if __name__ == "__main__":
    run()
