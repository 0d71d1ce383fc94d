"""Mutants of a C++ text: one small change each, by the operators of OPERATORS. Positions are found in a masked text, in
which comments, literals of text and preprocessor lines are blank, so that they are never changed."""
import dataclasses
import re

BARRIERS = re.compile(r"(?:\w+(?:::|\.|->))*\w*(?:fence|barrier|arrive|wait|sync|commit_group|acquire|release)\w*$")
# A call in other order of its arguments, or a change inside of one, is the same program.
COMMUTATIVE = re.compile(r"min|max|fmin|fmax|plus|times|both|either|lesser|greater|equal|swap|gcd|add\w*|mul\w*|fma\w*$")
NO_CALLS = {"if", "for", "while", "switch", "return", "sizeof", "alignof", "catch", "decltype", "static_assert", "throw",
            "defined", "requires", "noexcept", "alignas", "operator", "asm", "volatile"}
# Hints to a compiler or an allocator, for which any value computes the same, and the words of messages.
SKIPPED = re.compile(r"\b(?:static_assert|assume|prefetch\w*|reserve|shrink_to_fit|__launch_bounds__|__builtin_expect"
                     r"|refuse\w*|complain\w*|Error)\s*\(")
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPENING, CLOSING = "([{", ")]}"


@dataclasses.dataclass(frozen=True)
class Mutant:
    operator: str
    begin: int  # the characters [begin, end) of the text become `replacement`
    end: int
    replacement: str

    def apply(self, text):
        return text[:self.begin] + self.replacement + text[self.end:]


def masked(text):
    """The text with what is no code blanked, character for character."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<delimiter>\w*)\(.*?\)(?P=delimiter)"|"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:[^\n\\]|\\\n|\\.)*", re.S | re.M)
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())
    text = pattern.sub(blank, text)
    for match in list(SKIPPED.finditer(text)):
        end = closing(text, match.end() - 1)
        text = text[:match.start()] + re.sub(r"[^\n]", " ", text[match.start():end + 1]) + text[end + 1:]
    # Heads of templates: their `<` and `>` compare nothing.
    for match in list(re.finditer(r"\btemplate <", text)):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            end += 1
        text = text[:match.start()] + re.sub(r"[^\n]", " ", text[match.start():end]) + text[end:]
    return text


def closing(text, at):
    """Where the bracket at `at` closes."""
    depth = 0
    for i in range(at, len(text)):
        if text[i] in OPENING:
            depth += 1
        elif text[i] in CLOSING:
            depth -= 1
            if depth == 0:
                return i
    return len(text) - 1


def opening(text, at):
    """Where the bracket that closes at `at` opens."""
    depth = 0
    for i in range(at, -1, -1):
        if text[i] in CLOSING:
            depth += 1
        elif text[i] in OPENING:
            depth -= 1
            if depth == 0:
                return i
    return 0


def operand_before(text, end):
    """Where the operand begins whose last character stands before `end`; `end` if there is none."""
    at = end
    while at > 0:
        if text[at - 1] in ")]" or (text[at - 1] == "}" and at == end):
            at = opening(text, at - 1)
        elif re.match(r"[\w.]", text[at - 1]):
            at -= 1
        elif text[at - 2:at] in ("->", "::"):
            at -= 2
        else:
            break
    return at


def operand_after(text, begin):
    """Where the operand ends that begins at `begin`; `begin` if there is none."""
    at = begin
    while at < len(text) and text[at] in "-!~*&":
        at += 1
    first = at
    while at < len(text):
        if text[at] in "([" or (text[at] == "{" and at > first):
            at = closing(text, at) + 1
        elif re.match(r"[\w.]", text[at]):
            at += 1
        elif text[at:at + 2] in ("->", "::"):
            at += 2
        else:
            break
    return at if at > first else begin


def extent_after(text, begin, stops):
    """Where an expression ends: at a bracket that it did not open, or at one of `stops` outside of brackets."""
    at = begin
    while at < len(text) and text[at] not in CLOSING:
        if text[at] in OPENING:
            at = closing(text, at)
        elif any(text.startswith(stop, at) for stop in stops):
            return at
        at += 1
    return at


def extent_before(text, end, stops):
    """Where an expression begins that ends before `end`: behind a bracket that it does not close, or one of `stops`."""
    at = end
    while at > 0 and text[at - 1] not in OPENING:
        if text[at - 1] in CLOSING:
            at = opening(text, at - 1)
            continue
        stop = next((stop for stop in stops if text.endswith(stop, 0, at)), None)
        if stop:
            break
        at -= 1
    return at + len(re.match(r"\s*", text[at:]).group())


def binary(text, pattern):
    """Places of binary operators: clang-format writes spaces on both sides, or a line's end behind."""
    return re.finditer(r"(?<=[\w)\]}] )(?:" + pattern + r")(?=[ \n])", text)


def comparison(text, code):
    for match in binary(code, r"[<>]=?|[=!]="):
        yield Mutant("comparison", match.start(), match.end(), COMPARISONS[match.group()])


def off_by_one(text, code):
    for match in re.finditer(r"(?<![\w.'])(0[xX][\da-fA-F']+|0|[1-9][\d']*)([uUlLzZ]*)(?![\w.'])", code):
        value = int(match[1].replace("'", ""), 0)
        for changed in {value + 1, max(value - 1, 0)} - {value}:
            yield Mutant("off by one", match.start(), match.end(), f"{changed}{match[2]}")
    for match in binary(code, r"[<>]=?|[=!]=|[-+]"):
        begin = match.end() + len(re.match(r"\s*", code[match.end():]).group())
        end = operand_after(code, begin)
        if begin < end and not code[begin].isdigit() and text[begin:end] == code[begin:end]:
            for change in "+-":
                yield Mutant("off by one", begin, end, f"({text[begin:end]} {change} 1)")


def arguments_of(code, open_at):
    """The extents of a call's arguments."""
    end, at, found = closing(code, open_at), open_at + 1, []
    while at < end:
        stop = min(extent_after(code, at, (",",)), end)
        found.append((at, stop))
        at = stop + 1
    return found


def is_declaration(argument):
    return re.fullmatch(r"(?:const |volatile )?[\w:]+(?:<[^()]*>)?(?: const)?[&*]* \w+(?: = .*)?|[\w:]+(?:<.*>)?[&*]+", argument, re.S)


def swapped(text, code):
    def exchange(a, b, c, d):
        first, second = text[a:b], text[c:d]
        lead = len(second) - len(second.lstrip())
        # A blank one is a literal of text.
        if first.strip() != second.strip() and code[a:b].strip() and code[c:d].strip():
            yield Mutant("swapped operands", a, d, first[:len(first) - len(first.lstrip())] + second.strip() +
                         text[b:c] + second[:lead] + first.strip())

    for match in binary(code, r"-|/|%|<<|[<>]=?"):
        begin = operand_before(code, match.start() - 1)
        second = match.end() + len(re.match(r"\s*", code[match.end():]).group())
        end = operand_after(code, second)
        if begin < match.start() - 1 and second < end:
            yield from exchange(begin, match.start() - 1, second, end)
    for match in re.finditer(r"(\w+)\(", code):
        if match[1] in NO_CALLS or COMMUTATIVE.match(match[1]):
            continue
        places = arguments_of(code, match.end() - 1)
        if any(is_declaration(code[a:b].strip()) for a, b in places):
            continue
        for (a, b), (c, d) in zip(places, places[1:]):
            yield from exchange(a, b, c, d)
    for a, b, c, d, _ in conditionals(code):
        yield from exchange(a, b, c, d)


def conditionals(code):
    """(begin and end of both arms, begin of the condition) of each `? :`."""
    for match in re.finditer(r"(?<=[\w)\]}]) \? |\n *\? ", code):
        depth, at = 1, match.end()
        while depth and at < len(code) and code[at] not in ";" + CLOSING:
            if code[at] in OPENING:
                at = closing(code, at)
            elif code.startswith(" ? ", at):
                depth += 1
            elif re.match(r"\s: ", code[at:]):
                depth -= 1
            at += 1
        if depth == 0:
            end = extent_after(code, at + 2, (",", ";"))
            begin = extent_before(code, match.start(), (",", ";", " = ", "return ", " << "))
            yield match.end(), at - 1, at + 2, end, begin


def dropped_branch(text, code):
    for match in re.finditer(r"\bif (?:constexpr )?(?=\()", code):
        begin, end = match.end() + 1, closing(code, match.end())
        begin = extent_after(code, begin, (";",)) + 1 if ";" in code[begin:end] else begin
        if re.search(r"[^=!<>]=[^=]", code[begin:end]):  # declares what it asks for
            continue
        yield Mutant("dropped branch", begin, end, f"false && ({text[begin:end].strip()})")
    for _, _, second, end, begin in conditionals(code):
        yield Mutant("dropped branch", begin, end, text[second:end].strip())
    # One side of a condition.
    for match in binary(code, r"&&|\|\|"):
        begin = extent_before(code, match.start() - 1, (",", ";", " = ", "return ", "&&", "||", " ? ", " : "))
        end = extent_after(code, match.end(), (",", ";", "&&", "||", " ? ", " : "))
        if begin < match.start():
            yield Mutant("dropped branch", begin, match.end() + 1, "")
            yield Mutant("dropped branch", match.start() - 1, end, "")


def dropped_barrier(text, code):
    for match in re.finditer(r"(?<=[;{})\n]) *((?:\w+(?:::|\.|->))*\w+)(?:<[^;()]*>)?\(", code):
        end = closing(code, match.end() - 1)
        if BARRIERS.match(match[1]) and code[end + 1:end + 2] == ";":
            yield Mutant("dropped barrier", match.start(1), end + 1, "")


OPERATORS = {
    "comparison": comparison,            # < for <=, == for != and back
    "off by one": off_by_one,            # an integer, or the right operand of a comparison, sum or difference
    "swapped operands": swapped,         # of - / % << and comparisons, a call's arguments, the arms of ?:
    "dropped branch": dropped_branch,    # `if` never taken, the second arm of ?:, one side of && and ||
    "dropped barrier": dropped_barrier,  # a call that waits, arrives, synchronises or fences
}


def mutants_by_line(text):
    """{line: {operator: [mutants]}}; a mutant belongs to the line where it begins."""
    code = masked(text)
    found = {}
    for name, operator in OPERATORS.items():
        for mutant in operator(text, code):
            if mutant.apply(text) != text:
                line = text.count("\n", 0, mutant.begin) + 1
                found.setdefault(line, {}).setdefault(name, []).append(mutant)
    return found
