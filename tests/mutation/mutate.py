#!/usr/bin/env python3
"""Sows defects, one at a time, and says which of them no test notices.

    mutate.py --seed 7 --mutants 40         # draws, builds, tests; again: goes on where it stopped
    mutate.py --list planted.json           # plants given defects
    mutate.py --seed 7 --mutants 40 --show  # only prints the changes, without a test

The work folder has the tree under test (a clone of the last commit), its build, the coverage, and a log of one JSON
object a line beside the table. Needs Clang with its coverage tools, CMake and Ninja.
"""
import argparse
import dataclasses
import difflib
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import coverage
import mutants
from runner import Runner

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FLAGS = "-w -fprofile-instr-generate -fcoverage-mapping"


@dataclasses.dataclass
class Change:
    file: str
    lines: list  # those of the unchanged text whose tests are run
    operator: str
    text: str  # of the whole mutated file
    by: str = ""  # "EXECUTABLE:FILTER": the cases that are known to notice it


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def prepare(work, options, tests=None):
    """The tree of the commit and its instrumented build, with all tests or some."""
    tree, build = work / "tree", work / "build"
    commit = git("-C", str(REPOSITORY), "rev-parse", options.commit)
    if not tree.exists():
        git("clone", "--quiet", "--shared", "--no-checkout", str(REPOSITORY), str(tree))
    git("-C", str(tree), "fetch", "--quiet", "origin")
    git("-C", str(tree), "checkout", "--quiet", "--force", "--detach", commit)
    command = ["cmake", "--preset", "quick", "-S", str(tree), "-B", str(build), "--log-level=WARNING",
               "-DFLASHJIT_WERROR=OFF", "-DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    if options.plugin_from:
        command.append(f"-DFLASHJIT_LLVM_FROM={options.plugin_from.resolve()}")
    env = coverage.environment(build)
    subprocess.run(command, check=True, cwd=tree, env=env)
    without = coverage.LEFT_OUT | set(options.without)
    targets = tests or [name for name in coverage.executables_of(tree) if name not in without] + ["flashjit_command"]
    subprocess.run(["cmake", "--build", str(build), "--target", *targets], check=True, env=env,
                   stdout=subprocess.DEVNULL)
    return commit, tree, build


def carried(lines, old, new):
    """Coverage of the lines that two texts share."""
    found = {}
    for a, b, size in difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), False).get_matching_blocks():
        for i in range(size):
            if str(a + i + 1) in lines:
                found[str(b + i + 1)] = lines[str(a + i + 1)]
    return found


def measured(work, commit, tree, build, options):
    file = work / "coverage.json"
    if file.exists():
        known = json.loads(file.read_text())
        if known["commit"] == commit:
            return known
        if options.carry:
            for kind in ("lines", "kernels"):
                for path in [path for path in known[kind] if (tree / path).exists()]:
                    old = git("-C", str(tree), "show", f'{known["commit"]}:{path}')
                    known[kind][path] = carried(known[kind][path], old, (tree / path).read_text())
                known[kind] = {path: lines for path, lines in known[kind].items() if (tree / path).exists()}
            return known
    known = coverage.measure(build, tree, 1, options.jobs, work / f"coverage-{commit[:12]}",
                             set(options.without)) | {"commit": commit}
    file.write_text(json.dumps(known))
    return known


def drawn(tree, known, seed):
    """Changes without end: a random executed line that an operator fits, an operator, a place in the line."""
    choice = random.Random(seed)
    texts, lines = {}, []
    for path in sorted(set(known["lines"]) | set(known["kernels"])):
        executed = set(known["lines"].get(path, ())) | set(known["kernels"].get(path, ()))
        texts[path] = (tree / path).read_text()
        found = mutants.mutants_by_line(texts[path])
        lines += [(path, line, found[line]) for line in sorted(found) if str(line) in executed]
    while True:
        path, line, operators = choice.choice(lines)
        name = choice.choice(sorted(operators))
        yield Change(path, [line], name, choice.choice(operators[name]).apply(texts[path]))


def listed(tree, file):
    """Changes that a file names: {"file", "why", "find", "replace"}, where `find` stands once in the file, and maybe
    "by"."""
    for item in json.loads(pathlib.Path(file).read_text()):
        text = (tree / item["file"]).read_text()
        if text.count(item["find"]) != 1:
            sys.exit(f'{item["file"]} holds {item["find"]!r} {text.count(item["find"])} times; name it anew')
        first = text.count("\n", 0, text.index(item["find"])) + 1
        lines = range(first, first + item["find"].count("\n") + 1)
        yield Change(item["file"], list(lines), item["why"], text.replace(item["find"], item["replace"]), item.get("by", ""))


def difference(tree, change):
    old = (tree / change.file).read_text().splitlines()
    lines = list(difflib.unified_diff(old, change.text.splitlines(), lineterm="", n=0))[2:]
    return [line for line in lines if not line.startswith("@@")]


def row(record):
    changed = " ".join(line[1:].strip() for line in record["change"] if line[0] == "+").replace("|", "\\|")
    by = "**lives**" if record["result"] == "lives" else record["by"]
    return f'| `{record["file"]}` {record["line"]} | {record["operator"]} | `{changed}` | {by} |'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--list", type=pathlib.Path, help="a JSON file of changes, instead of drawing them")
    parser.add_argument("--only", help="changes of files that begin so")
    parser.add_argument("--show", action="store_true", help="print the changes and run nothing")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--carry", action="store_true",
                        help="where coverage is of an earlier commit, take it for the lines that have not changed since")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=pathlib.Path, default=REPOSITORY / "build" / "mutation")
    parser.add_argument("--without", nargs="+", default=[], metavar="TEST", help="executables that are not run")
    parser.add_argument("--plugin-from", type=pathlib.Path, help="a build whose LLVM plugin is used, as sanitizer builds do")
    options = parser.parse_args()

    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    items = json.loads(options.list.read_text()) if options.list else []
    named = {item["by"].partition(":")[0] for item in items} if items and all("by" in item for item in items) else None
    commit, tree, build = prepare(work, options, named)
    if named:
        known = {"lines": {}, "kernels": {}, "seconds": {}, "failing": {}, "sources": []}
    else:
        known = measured(work, commit, tree, build, options)
    runner = Runner(tree, build, known, options.jobs)
    for cases in sorted({item["by"] for item in items if "by" in item}):
        verdict = runner.verdict("", [], cases)
        if verdict.result != "lives":
            sys.exit(f"without any defect, {cases} fails: {verdict.by}")
    source = options.list.stem if options.list else f"seed-{options.seed}"
    print(f"commit {commit[:12]}, {source}")

    log = work / f"{source}-{commit[:12]}.jsonl"
    done = {(r["file"], tuple(r["change"])): r for r in map(json.loads, log.open())} if log.exists() else {}
    records, refused = [], 0
    changes = listed(tree, options.list) if options.list else drawn(tree, known, options.seed)
    for change in changes:
        if not options.list and len(records) == options.mutants:
            break
        if options.only and not change.file.startswith(options.only):
            continue
        what = difference(tree, change)
        key = (change.file, tuple(what))
        if options.show:
            records.append({})
            print(f"{change.file}:{change.lines[0]}  {change.operator}", *what, sep="\n  ")
            continue
        if key not in done:
            began = time.monotonic()
            original = (tree / change.file).read_text()
            try:
                (tree / change.file).write_text(change.text)
                verdict = runner.verdict(change.file, change.lines, change.by)
            finally:
                (tree / change.file).write_text(original)
            done[key] = {"file": change.file, "line": change.lines[0], "operator": change.operator, "change": what,
                         "result": verdict.result, "by": verdict.by, "seconds": round(time.monotonic() - began)}
            with log.open("a") as out:
                out.write(json.dumps(done[key]) + "\n")
        record = done[key]
        if record["result"] == "does not compile" and not options.list:
            refused += 1
            continue
        records.append(record)
        print(f'{len(records)}. {record["seconds"]} s', row(record), flush=True)

    if not options.show:
        lives = sum(r["result"] == "lives" for r in records)
        head = [f"Commit {commit[:12]}, {source}: {len(records)} mutants, {lives} live; {refused} did not compile.", "",
                "| line | operator | becomes | noticed by |", "| --- | --- | --- | --- |"]
        table = "\n".join(head + [row(r) for r in records]) + "\n"
        (work / f"{source}.md").write_text(table)
        print(table)


if __name__ == "__main__":
    main()
