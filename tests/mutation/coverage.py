"""Which tests execute which lines. Host code, and device code that tests compile for the host, by Clang's coverage of
an instrumented build. Kernels for CPUs are compiled in process, without coverage: a line counts as executed where a
kernel that the tests compiled has instructions of it."""
import concurrent.futures
import json
import os
import random
import re
import subprocess
import time

SOURCES = ("codegen/", "cache/", "runtime/", "templates/")
# The executables that launch kernels for CPUs, and so execute the lines of `kernels`.
KERNEL_TESTS = ("amx_test", "bf16_backward_test", "api_test", "numerics_test", "allocation_test", "tune_test", "cli_test")
# `tools/test --quick` takes as many numerics cases.
QUICK = {"FLASHJIT_TEST_QUICK": "1", "FLASHJIT_TEST_CASES": "40"}
WHOLE = {"FLASHJIT_TEST_ALL": "1"}
SAMPLED_KERNELS = 240
# Tests that compile hundreds of kernels for GPUs take longer than all others together.
LEFT_OUT = {"nvrtc_test"}


def tool(name):
    for candidate in (f"{name}-19", name):
        if any(os.access(os.path.join(folder, candidate), os.X_OK) for folder in os.environ["PATH"].split(":")):
            return candidate
    raise SystemExit(f"{name} is needed; tools/setup installs it with Clang")


def executables_of(tree):
    """The names of all test executables."""
    names = set()
    for path in (tree / "tests").rglob("CMakeLists.txt"):
        text = path.read_text()
        for loop in re.findall(r"foreach\(test ([^)]*)\)", text):
            names |= set(loop.split())
        names |= set(re.findall(r"add_flashjit_test\(\s*(\w+)", text))
    return sorted(name for name in names if name.endswith("_test"))


def environment(build, **more):
    return os.environ | QUICK | {"FLASHJIT_CACHE_DIR": str(build / "test-cache"), "LLVM_PROFILE_FILE": "/dev/null"} | more


def lines_of(build, tree, executable, profile):
    """{file: [executed lines]} of one executable's profile."""
    binaries = [build / "bin" / executable]
    if executable == "cli_test":
        binaries += [build / "bin" / "flashjit", *(build / "lib").glob("libflashjit.so")]
    command = [tool("llvm-cov"), "export", "-format=lcov", f"-instr-profile={profile}", str(binaries[0])]
    for binary in binaries[1:]:
        command += ["-object", str(binary)]
    text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    found, lines = {}, None
    for line in text.splitlines():
        if line.startswith("SF:"):
            path = os.path.relpath(line[3:], tree)
            lines = found.setdefault(path, []) if path.startswith(SOURCES) else None
        elif line.startswith("DA:") and lines is not None:
            number, count = line[3:].split(",")[:2]
            if int(count) > 0:
                lines.append(int(number))
    return found


def measured(build, tree, executable, profiles):
    """Runs a test; (seconds, names of the cases that fail without any mutant, executed lines)."""
    profiles.mkdir(parents=True, exist_ok=True)
    for old in profiles.glob(f"{executable}-*"):
        old.unlink()
    began = time.monotonic()
    run = subprocess.run([str(build / "bin" / executable)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         errors="replace", stdin=subprocess.DEVNULL, cwd=build, timeout=3600,
                         env=environment(build, LLVM_PROFILE_FILE=str(profiles / f"{executable}-%4m.profraw")))
    seconds = time.monotonic() - began
    failing = sorted(set(re.findall(r"^\[  FAILED  \] ([\w/.]+)", run.stdout, re.M)))
    if run.returncode and not failing:
        raise SystemExit(f"{executable} ends with {run.returncode} without any mutant:\n{run.stdout[-2000:]}")
    merged = profiles / f"{executable}.profdata"
    subprocess.run([tool("llvm-profdata"), "merge", "-sparse", "-o", str(merged),
                    *map(str, profiles.glob(f"{executable}-*.profraw"))], check=True)
    return seconds, failing, lines_of(build, tree, executable, merged)


def kernel_sources(build, seed):
    """Rendered sources of a sample of the kernels for CPUs that the tests left in their cache."""
    command = build / "bin" / "flashjit"
    listed = subprocess.run([command, "cache", "ls", "--json", "--cache-dir", build / "test-cache"], check=True,
                            stdout=subprocess.PIPE, text=True, env=environment(build)).stdout
    kernels = sorted({(entry["fields"]["spec"], json.dumps(entry["metadata"]["config"]), entry["metadata"]["target"])
                      for entry in json.loads(listed)
                      if not entry["damage"] and entry["metadata"]["target"].startswith("x86")})
    random.Random(seed).shuffle(kernels)
    sources = {}
    for spec, config, target in kernels[:SAMPLED_KERNELS]:
        pinned = json.dumps(json.loads(spec) | {"config": json.loads(config)})
        for text in (pinned, spec):  # operations without tiles take no config
            run = subprocess.run([command, "render", text, "--target", target], stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, text=True, env=environment(build))
            if run.returncode == 0:
                sources[run.stdout] = target
                break
    return list(sources.items())


def kernel_command(target):
    return [tool("clang++"), "-std=c++20", "-x", "c++", "-w", "-ffreestanding", "-fno-rtti",
            "-march=" + target.split("+")[0], *(["-mamx-tile", "-mamx-bf16"] if "amx" in target else []),
            *(["-mavx512bf16"] if "+bf16" in target else [])]


def kernel_lines(tree, source, target):
    """{file: {line}} with instructions of a kernel, before any optimisation."""
    run = subprocess.run([*kernel_command(target), "-I", str(tree / "templates"), "-O0", "-gline-tables-only",
                          "-S", "-emit-llvm", "-o", "-", "-"], input=source, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(f"a kernel for {target} does not compile:\n{run.stderr[:2000]}")
    text = run.stdout
    files, scopes = {}, {}
    for number, name, folder in re.findall(r'^!(\d+) = !DIFile\(filename: "([^"]*)", directory: "([^"]*)"', text, re.M):
        files[number] = os.path.relpath(os.path.join(folder, name), tree)
    parents = {}
    for number, kind, rest in re.findall(r"^!(\d+) = (?:distinct )?!(DISubprogram|DILexicalBlock\w*)\((.*)\)$", text, re.M):
        file = re.search(r"\bfile: !(\d+)", rest)
        scopes[number] = files.get(file[1]) if file else None
    found = {}
    for line, scope in re.findall(r"!DILocation\(line: (\d+),.*?scope: !(\d+)", text):
        path = scopes.get(scope)
        if path and path.startswith(SOURCES) and int(line) > 0:
            found.setdefault(path, set()).add(int(line))
    return found


def measure(build, tree, seed, jobs, folder, without, log=print):
    """The coverage of all tests. Each executable's is kept in `folder`, so that a run that is broken off goes on."""
    result = {"seconds": {}, "failing": {}, "lines": {}, "kernels": {}, "sources": []}
    folder.mkdir(parents=True, exist_ok=True)

    def once(name):
        file = folder / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(measured(build, tree, name, build / "profiles")))
        return json.loads(file.read_text())

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        names = [name for name in executables_of(tree) if name not in LEFT_OUT | without]
        for name, (seconds, failing, lines) in zip(names, pool.map(once, names)):
            log(f"{name}: {seconds:.1f} s" + (f", fails: {' '.join(failing)}" if failing else ""), flush=True)
            result["seconds"][name] = round(seconds, 1)
            result["failing"][name] = failing
            for path, numbers in lines.items():
                for number in numbers:
                    result["lines"].setdefault(path, {}).setdefault(str(number), []).append(name)
        sources = kernel_sources(build, seed)
        for index, lines in enumerate(pool.map(lambda s: kernel_lines(tree, *s), sources)):
            result["sources"].append(sources[index])
            for path, numbers in lines.items():
                for number in numbers:  # an example, with which a mutant is compiled first
                    result["kernels"].setdefault(path, {}).setdefault(str(number), index)
    log(f"{len(sources)} kernels for CPUs")
    return result
