"""python -m fagen."""

from fagen.cli import main

if __name__ == "__main__":
    main()
