"""`python -m icefloe` is the same as the command `icefloe`."""

from icefloe.cli import main

if __name__ == "__main__":
    main()
