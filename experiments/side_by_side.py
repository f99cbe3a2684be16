"""Puts JSON results into one object, by the names of their files, so that a table can hold them against each other.

python experiments/side_by_side.py OUT FILE...
"""

import json
import sys
from pathlib import Path


def main(out: str, *files: str) -> None:
    found = {Path(file).stem: json.loads(Path(file).read_text()) for file in files}
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
