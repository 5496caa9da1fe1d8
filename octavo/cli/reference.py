"""The page of all settings, docs/flags.md: ``python -m octavo.cli.reference > docs/flags.md`` writes it."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from octavo.cli.settings import flag_name
from octavo.config import ServeConfig, settings
from octavo.names_of_others import ADVICE, FLAGS_OF_OTHERS, PASSED_OVER
from octavo.setting import Setting

START = """\
# Settings

Every setting of `octavo serve`; other commands have those of the engine: model, cache, scheduler and speculative
settings. `--max-num-seqs 8` on the command line, `OCTAVO_MAX_NUM_SEQS=8` in the environment and `max_num_seqs: 8` in
the YAML file of `--config` mean the same. Flags override the environment, which overrides the file. A switch that is
on is turned off by its `--no-` form.

`python -m octavo.cli.reference > docs/flags.md` writes this page.
"""
OTHERS = """
## Flags of other servers

These mean the setting beside them:

| flag | setting |
|---|---|
"""
PASSED = """
These are passed over, with a line that says why; those with values, only with these:

| flag | why |
|---|---|
"""
REFUSED = """
These are refused:

| flag | instead |
|---|---|
"""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([*_lines()]) + "\n"


def _lines() -> Iterator[str]:
    yield from START.splitlines()
    owners, group = typing.get_type_hints(ServeConfig), ""
    for item in settings(ServeConfig):
        if item.group != group:
            group = item.group
            yield from ("", f"## {group.capitalize()}", "", str(owners[group].__doc__), "")
            yield from ("| flag | default | what it is |", "|---|---|---|")
        yield f"| `{flag_name(item.name)}` | {_default(item)} | {_cell(item.help)}{_allowed(item)} |"
    yield from OTHERS.splitlines()
    for flag, name in FLAGS_OF_OTHERS.items():
        yield f"| `{flag}` | `{flag_name(name)}` |"
    yield from PASSED.splitlines()
    for flag, passed in PASSED_OVER.items():
        values = "".join(f" `{value}`" for value in passed.values or ())
        yield f"| `{flag}`{values} | {_cell(passed.why)} |"
    yield from REFUSED.splitlines()
    for flag, advice in ADVICE.items():
        yield f"| `{flag}` | {_cell(advice)} |"


def _default(item: Setting) -> str:
    if item.default is None:
        return ""
    if item.type is bool:
        return "on" if item.default else "off"
    return f"`{item.default}`"


def _allowed(item: Setting) -> str:
    """The values that are allowed, where there are bounds."""
    if item.choices:
        return " (" + ", ".join(f"`{choice}`" for choice in item.choices) + ")"
    bounds = [f"at least {_number(item.low)}"] if item.low is not None else []
    bounds += [f"at most {_number(item.high)}"] if item.high is not None else []
    return f" ({', '.join(bounds)})" if bounds else ""


def _number(bound: float) -> str:
    """The bound of a setting; an integer is written out, not as a power of ten."""
    return str(bound) if isinstance(bound, int) else f"{bound:.12g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
