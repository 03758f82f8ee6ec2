"""Writes known replies of each kind to a file, for machines without the repository.

python -m benchmarks.replies FILE.json.xz [--repository .] [--newest HEAD] [--commits 200] [--most 44]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.replies.kinds import TINY, known_replies, write
from benchmarks.script import parser_of, positive


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--repository", type=Path, default=Path())
    parser.add_argument("--newest", default="HEAD", help="the last commit")
    parser.add_argument("--commits", type=positive, default=200)
    parser.add_argument("--tokenizer", type=Path, default=TINY, help="a tokenizer.json")
    parser.add_argument("--prompt", type=positive, default=3072, help="most tokens")
    parser.add_argument("--reply", type=positive, default=256, help="most tokens; longer ones are cut")
    parser.add_argument("--most", type=positive, default=44, help="replies of a kind, the newest")
    args = parser.parse_args()
    found = known_replies(args.repository, args.newest, args.commits, args.tokenizer, args.prompt)
    write(args.file, {kind: [one.cut(args.reply) for one in known[-args.most :]] for kind, known in found.items()})


if __name__ == "__main__":
    main()
