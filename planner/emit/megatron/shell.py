"""The words of a shell script, and the flags among them, read without running anything.

Understood: quotes, comments, line continuations, ``NAME=value`` and ``NAME=(words)``, and ``$NAME``, ``${NAME}``, ``${NAME:-default}``
of names with one literal value. Anything else (``$(...)``, arithmetic, loops) stays text.
"""

from __future__ import annotations

import re
import shlex

ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\})")
STOPS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>&1", "&>", ")", "(", "then", "fi", "done", "exec", "srun"}


def words(text: str) -> list[str]:
    """The words of a script in order, with known variables put in their places; lines that are no shell are skipped."""
    joined = re.sub(r"\\\r?\n", " ", text)
    found = _split(joined)
    values = assignments(found)
    return [known(word, values) for word in found]


def _split(text: str) -> list[str]:
    try:
        return _lex(text)
    except ValueError:
        out: list[str] = []
        for line in text.splitlines():
            try:
                out += _lex(line)
            except ValueError:
                continue
        return out


def _lex(text: str) -> list[str]:
    """shlex's words; semicolons and the parentheses of arrays stand alone."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";()")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def assignments(found: list[str]) -> dict[str, str]:
    """Names with their values; the last one counts, as the shell would have it. ``: "${NAME:=value}"`` assigns where nothing did."""
    values: dict[str, str] = {}
    for word in found:
        if match := re.fullmatch(r"\$\{([A-Za-z_]\w*):?=([^}]*)\}", word):
            values.setdefault(match[1], match[2])
        elif (match := ASSIGNMENT.fullmatch(word)) and not word.startswith("-"):
            values[match[1]] = known(match[2], values)
    return values


def known(word: str, values: dict[str, str]) -> str:
    """``word`` with references to known names replaced; defaults of unknown names are taken."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return values.get(name, match[3] if match[3] is not None else match[0])

    return REFERENCE.sub(value, word)


def flags(text: str) -> dict[str, tuple[str, ...]]:
    """``--name value ...`` of a script or an argument file; a flag that is given twice has its last values, as argparse has it."""
    out: dict[str, tuple[str, ...]] = {}
    name, values = "", list[str]()

    def close() -> None:
        if name:
            out[name] = tuple(values)

    for word in _nested(words(text)):
        if re.match(r"--[A-Za-z]", word):
            close()
            name, sep, value = word.partition("=")
            values = [value] if sep else []
        elif word in STOPS or ASSIGNMENT.fullmatch(word) or "[@]" in word or word == "$@" or word.startswith(("{", "}")):
            close()
            name, values = "", []
        elif name:
            values.append(word)
    close()
    return out


def _nested(found: list[str]) -> list[str]:
    """Words with the flags inside string variables (``GPT_ARGS="--num-layers 24 ..."``) taken apart."""
    out: list[str] = []
    for word in found:
        match = ASSIGNMENT.fullmatch(word)
        inner = match[2] if match and not word.startswith("-") else word if " --" in word or "\n--" in word else ""
        if re.search(r"(^|\s)--[A-Za-z]", inner) and not (match is None and word.startswith("--")):
            out += [";", *_split(inner), ";"]
        else:
            out.append(word)
    return out
