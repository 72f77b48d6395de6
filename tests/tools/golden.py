"""Write the golden runs of tests/golden anew: make golden ARGS="qwen3 gemma2" for some families.

The commit that changes them says why the numbers changed.
"""

import sys

from tests.shared import golden


def main(families: list[str]) -> int:
    known = dict.fromkeys(family for family, _ in golden.CELLS)
    if unknown := [name for name in families if name not in known]:
        sys.exit(f"{', '.join(unknown)}: no family of golden runs; they are {', '.join(known)}")
    cells = [cell for cell in golden.CELLS if not families or cell[0] in families]
    found: dict[str, dict] = {}
    for group in golden.worlds(cells):
        for family, own in golden.curves(group).items():
            found.setdefault(family, {}).update(own)
    changed = []
    for family, layout in cells:
        old = golden.kept(family).get(layout)
        if old != found[family][layout]:
            changed.append(f"{family} {layout}: {'new' if old is None else 'changed'}")
    golden.write(found)
    print(*changed, f"{len(cells)} curves written, {len(changed)} with other bits", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
