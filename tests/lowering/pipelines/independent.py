"""What tests compare with: a judge and a simulation that read the text of schedules alone.

They share no code with `lowering/pipelines`. The simulation goes from one unit of time to the next,
and asks each stage what it can do. So all times are whole numbers, and computations take one or
more.
"""

import random
import re

CELL = re.compile(r"(\d+)([FIWB])(\d+)")


def work(cell):
    """Returns (kind, chunk, microbatch) of what a cell computes; `B` is `I` and `W`."""
    done = []
    for chunk, kind, microbatch in CELL.findall(cell.removesuffix("OVERLAP_F_B")):
        done += [(one, int(chunk), int(microbatch)) for one in ("IW" if kind == "B" else kind)]
    return done


def operands(kind, chunk, microbatch, chunks):
    if kind == "W":
        return [("I", chunk, microbatch)]
    if kind == "F":
        return [("F", chunk - 1, microbatch)] if chunk else []
    later = [("I", chunk + 1, microbatch)] if chunk < chunks - 1 else []
    return [("F", chunk, microbatch), *later]


def is_right(rows, chunks, microbatches):
    """Returns whether the rows of cells train the model, each result at its place and time."""
    done = [one for row in rows for cell in row for one in work(cell)]
    if sorted(done) != sorted(
        (kind, c, k) for kind in "FIW" for c in range(chunks) for k in range(microbatches)
    ):
        return False
    for chunk in range(chunks):
        if sum(any(w[1] == chunk for cell in row for w in work(cell)) for row in rows) != 1:
            return False
    left = [list(row) for row in rows]
    known = set()
    while any(left):
        runnable = [
            row
            for row in left
            if row
            and all(
                operand in known or operand in work(row[0])
                for one in work(row[0])
                for operand in operands(*one, chunks)
            )
        ]
        if not runnable:
            return False
        for row in runnable:
            known.update(work(row.pop(0)))
    return True


def simulate(rows, chunks, seconds, send=lambda kind, chunk: 0):
    """Returns when each cell begins, as {(stage, cell): time}, and the makespan.

    Args:
        seconds: of (kind, chunk), the time of `F`, `I` or `W`.
        send: of (kind, chunk), the time of the message with this result.
    """
    home = {w[1]: stage for stage, row in enumerate(rows) for cell in row for w in work(cell)}
    left = [list(row) for row in rows]
    running = [None] * len(rows)
    links = {}
    there = {stage: set() for stage in range(len(rows))}
    begins, time = {}, 0
    while True:
        for stage, current in enumerate(running):
            if current and current[0] == time:
                for one in current[1]:
                    there[stage].add(one)
                    target = home.get(one[1] + {"F": 1, "I": -1, "W": 10**9}[one[0]])
                    if target not in (None, stage):
                        links.setdefault((stage, target), [None, []])[1].append(one)
                running[stage] = None
        for (_, target), link in links.items():
            while link[1]:
                if link[0] is None:
                    link[0] = time + send(*link[1][0][:2])
                if link[0] > time:
                    break
                there[target].add(link[1].pop(0))
                link[0] = None
        for stage, row in enumerate(left):
            if running[stage] or not row:
                continue
            begun = work(row[0])
            wanted = [o for one in begun for o in operands(*one, chunks) if o not in begun]
            if all(operand in there[stage] for operand in wanted):
                begins[stage, row[0]] = time
                running[stage] = (time + sum(seconds(*one[:2]) for one in begun), begun)
                row.pop(0)
        if not any(left) and not any(running):
            return begins, time
        time += 1
        assert time < 10**5, "deadlock"


def random_rows(seed, stages, chunks, microbatches):
    """Returns rows of a right schedule: any order in which one after the other could be done."""
    draw = random.Random(seed)
    home = [*range(stages), *(draw.randrange(stages) for _ in range(chunks - stages))]
    draw.shuffle(home)
    left = []
    for c in range(chunks):
        for k in range(microbatches):
            left += [
                f"{c}F{k}",
                *([f"{c}B{k}"] if draw.random() < 0.5 else [f"{c}I{k}", f"{c}W{k}"]),
            ]
    rows, known = [[] for _ in range(stages)], set()
    while left:
        ready = [
            cell
            for cell in left
            if all(o in known or o in work(cell) for w in work(cell) for o in operands(*w, chunks))
        ]
        cell = draw.choice(ready)
        left.remove(cell)
        known.update(work(cell))
        rows[home[work(cell)[0][1]]].append(cell)
    return rows
