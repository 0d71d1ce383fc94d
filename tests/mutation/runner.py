"""Builds a mutated tree target by target, and runs the tests that execute the changed lines until one fails."""
import dataclasses
import os
import queue
import re
import signal
import subprocess
import threading
import time

from coverage import KERNEL_TESTS, QUICK, WHOLE, environment, kernel_command


@dataclasses.dataclass
class Step:
    """One process: some cases of an executable."""
    executable: str
    filters: str
    variables: dict
    seconds: float  # what it takes without a mutant, about


@dataclasses.dataclass
class Verdict:
    result: str  # "killed", "lives", "does not compile"
    by: str = ""


# Words of a file's name that say little about which cases look at it.
COMMON_WORDS = {"cpu", "cuda", "shared", "sm80", "sm90a", "parts", "rows", "row", "params", "layout", "vectors", "family",
                "kernel", "arguments", "values", "json", "text", "test"}


def related(path):
    """A filter for the cases whose names share a word with the file's, which run first."""
    words = [word for word in re.split(r"[\W_]+", os.path.basename(path).rsplit(".", 1)[0]) if len(word) > 2]
    stems = {word.rstrip("s").capitalize()[:8] for word in words if word.lower() not in COMMON_WORDS}
    return ":".join(f"*{stem}*" for stem in sorted(stems))


def build_seconds(build):
    """What compiling each executable's own files took."""
    seconds = {}
    with open(build / ".ninja_log", encoding="utf-8") as log:
        for line in log:
            fields = line.split("\t")
            match = re.search(r"CMakeFiles/(\w+)\.dir/.*\.o$", fields[3]) if len(fields) > 4 else None
            if match:
                seconds[match[1]] = seconds.get(match[1], 0) + (int(fields[1]) - int(fields[0])) / 1000
    return seconds


class Runner:
    def __init__(self, tree, build, coverage, jobs):
        self.tree, self.build, self.coverage, self.jobs = tree, build, coverage, jobs
        self.build_seconds = build_seconds(build)

    def reaching(self, path, lines):
        """The executables that execute one of these lines."""
        found = set()
        for line in lines:
            found |= set(self.coverage["lines"].get(path, {}).get(str(line), []))
            if str(line) in self.coverage["kernels"].get(path, {}):
                found |= set(KERNEL_TESTS) & set(self.coverage["seconds"])
        return found

    def steps(self, path, executables):
        """What to run for a change of `path`: the cheapest first, numerics' other cases last."""
        def cost(name):
            own = self.build_seconds.get(name, 0) if path.startswith("templates/") else 0
            return self.coverage["seconds"][name] + own
        first = related(path)
        found, later = [], []
        for name in sorted(executables, key=cost):
            seconds, broken = self.coverage["seconds"][name], ":".join(self.coverage["failing"][name])
            if seconds < 10 or not first:
                found.append(Step(name, f"-{broken}", QUICK, seconds))
            else:
                found.append(Step(name, f"{first}-{broken}", QUICK, seconds))
                later.append(Step(name, f"-{first}:{broken}", QUICK, seconds))
        if "numerics_test" in executables:
            later.append(Step("numerics_test", "-" + ":".join(self.coverage["failing"]["numerics_test"]), {},
                              4 * self.coverage["seconds"]["numerics_test"]))
        if path.startswith("templates/"):  # what the seed's samples leave out
            later += [Step(name, f"{first or '*'}-{':'.join(self.coverage['failing'][name])}", WHOLE,
                           10 * self.coverage["seconds"][name])
                      for name in sorted(executables - {"numerics_test"}, key=cost)]
        return found + later

    def compiles(self, path, lines):
        """Whether a kernel that has one of the lines compiles; kernels compile while tests run, and a failure there
        would count as noticed."""
        examples = {self.coverage["kernels"].get(path, {}).get(str(line)) for line in lines} - {None}
        for index in examples:
            source, target = self.coverage["sources"][index]
            run = subprocess.run([*kernel_command(target), "-I", str(self.tree / "templates"), "-fsyntax-only", "-"],
                                 input=source, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if run.returncode:
                return False
        return True

    def build_target(self, target):
        run = subprocess.run(["cmake", "--build", str(self.build), "--target", target], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                             env=environment(self.build))
        if run.returncode:
            # A program that writes sources may be what the change breaks; a compiler's message has "error:".
            return "error:" in run.stdout or "static assertion" in run.stdout, run.stdout
        return None

    def verdict(self, path, lines, by=""):
        """What becomes of the change that the tree has now. `by`: "EXECUTABLE:FILTER", cases that are enough."""
        if by:
            name, _, cases = by.partition(":")
            return self.outcome([Step(name, cases or "*", QUICK, 60)])
        executables = self.reaching(path, lines)
        if not executables:
            return Verdict("lives", "no test executes it")
        if not self.compiles(path, lines):
            return Verdict("does not compile")
        return self.outcome(self.steps(path, executables))

    def outcome(self, steps):
        todo, stop, results = queue.Queue(), threading.Event(), []

        def build_all():
            built = set()
            for step in steps:
                if stop.is_set():
                    break
                if step.executable not in built:
                    for target in {"cli_test": ["flashjit_command"]}.get(step.executable, []) + [step.executable]:
                        failure = self.build_target(target)
                        if failure:
                            results.append(Verdict("does not compile") if failure[0] else
                                           Verdict("killed", f"the build of {target}"))
                            stop.set()
                    built.add(step.executable)
                if not stop.is_set():
                    shards = self.jobs if step.seconds > 10 else 1
                    for shard in range(shards):
                        todo.put((step, shards, shard))
            for _ in range(self.jobs):
                todo.put(None)

        def run_all():
            while (item := todo.get()) is not None:
                if not stop.is_set():
                    failed = self.run(*item, stop)
                    if failed:
                        results.append(Verdict("killed", failed))
                        stop.set()

        threads = [threading.Thread(target=build_all)] + [threading.Thread(target=run_all) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [verdict for verdict in results if verdict.result == "does not compile"]
        return (refused or results or [Verdict("lives")])[0]

    def run(self, step, shards, shard, stop):
        """The failing case, or None. A process that takes far longer than without a mutant has failed."""
        limit = 60 + 10 * step.seconds
        variables = environment(self.build) | {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
        for name in QUICK | WHOLE:
            variables.pop(name, None)
        process = subprocess.Popen(
            [str(self.build / "bin" / step.executable), "--gtest_fail_fast", f"--gtest_filter={step.filters}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            cwd=self.build, env=variables | step.variables, start_new_session=True)
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout))
        reader.start()
        began = time.monotonic()
        late = False
        while process.poll() is None and not stop.is_set() and not late:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                late = time.monotonic() - began > limit
        # The session holds what the test itself has started.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        reader.join(5)
        text = "".join(lines)
        running = re.findall(r"^\[ RUN      \] (.+?)\s*$", text, re.M)
        if late:
            return f"{step.executable}: time-out in {running[-1] if running else 'its start'}"
        if stop.is_set() or process.returncode == 0:
            return None
        failed = re.findall(r"^\[  FAILED  \] ([\w/.]+)", text, re.M)
        return f"{step.executable}: {failed[0] if failed else 'crash in ' + (running[-1] if running else 'its start')}"
