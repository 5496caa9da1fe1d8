"""Messages as models of each family write them, and as they write them wrong."""

from __future__ import annotations

from octavo.text import reasoning
from octavo.text.message_parser import Call, CallProgress, Format, MessageParser, Piece, Text
from octavo.text.tool_calls.deepseek import ALL_BEGIN, ALL_END, BEGIN, DEEPSEEK_V3, END, SEPARATOR
from octavo.text.tool_calls.harmony import HARMONY
from octavo.text.tool_calls.hermes import HERMES
from octavo.text.tool_calls.llama3 import LLAMA3
from octavo.text.tool_calls.mistral import MISTRAL
from octavo.text.tool_calls.pythonic import PYTHONIC

NAMES = frozenset({"f", "get_weather"})
FORMATS: dict[str, Format] = {
    "hermes": HERMES.read(NAMES),
    "llama3": LLAMA3.read(NAMES),
    "mistral": MISTRAL.read(NAMES),
    "pythonic": PYTHONIC.read(NAMES),
    "deepseek": DEEPSEEK_V3.read(NAMES),
    "harmony": HARMONY.read(NAMES),
    "think": reasoning.after_thinking(reasoning.content_only, False),
    "inside": reasoning.after_thinking(reasoning.content_only, True),
    "think, hermes": reasoning.after_thinking(HERMES.read(NAMES), False),
    "inside, hermes": reasoning.after_thinking(HERMES.read(NAMES), True),
    "inside, deepseek": reasoning.after_thinking(DEEPSEEK_V3.read(NAMES), True),
}


def content(text: str) -> Text:
    return Text("content", text)


def thought(text: str) -> Text:
    return Text("reasoning", text)


def v3(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{END}"


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


IN_THOUGHT = 'I call.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
F = Call("f", '{"a": 1}')
EMPTY = Call("f", "{}")
WEATHER = Call("get_weather", '{"city": "S\u00e3o \\"P\\"", "days": [1, 2.5, null]}')
WEATHER_JSON = '{"city": "S\u00e3o \\"P\\"", "days": [1, 2.5, null]}'

CASES: list[tuple[str, str, list[Piece]]] = [
    # --- hermes
    ("hermes", "Hello <b>there</b>\n", [content("Hello <b>there</b>\n")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [F]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}}', [Call("f", '{"a":1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [EMPTY]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER_JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
        [content("Let me see."), WEATHER, F],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [Call("f", '{"a": "</tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> done', [F, content(" done")]),
    ("hermes", "<tool_call> [ ] </tool_call>x", [content("x")]),
    ("hermes", "<tool_call>[1]</tool_call>", [content("<tool_call>[1]</tool_call>")]),
    ("hermes", "a <tool_call> b", [content("a <tool_call> b")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', [Call("f", '{"a": [1', is_cut=True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"', [content('<tool_call>{"name": "f", "arguments": {"a"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [EMPTY]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [EMPTY]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [Call("f", '{"a": "1\\n2"}')]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]</tool_call>', [F, EMPTY]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "f"}</tool_call>x', [F, EMPTY, content("x")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [content('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')],
    ),
    ("hermes", '<tool_call>{"nam": "f"}</tool_call>', [content('<tool_call>{"nam": "f"}</tool_call>')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        [content('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        [Call("f", '{"a": 1e999}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        [Call("f", '{"a": "\\ud800"}')],
    ),
    ("hermes", '<tool_call>x<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [content("<tool_call>x"), F]),
    ("hermes", "<tool_call>" * 3, [content("<tool_call>" * 3)]),
    ("hermes", "<tool_call>" + '{"a":' * 100, [content("<tool_call>" + '{"a":' * 100)]),
    # --- llama 3
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', [F]),
    ("llama3", ' {"name": "f", "parameters": {"a": 1}}; {"name": "f", "arguments": {}}', [F, EMPTY]),
    ("llama3", '<|python_tag|>{"name": "other", "parameters": {"a": 1}}', [Call("other", '{"a": 1}')]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}<|python_tag|>{"name": "f"}', [F, EMPTY]),
    ("llama3", '{"name": "Bob", "parameters": {"a": 1}}', [content('{"name": "Bob", "parameters": {"a": 1}}')]),
    (
        "llama3",
        '{"name": "f", "parameters": {"a": 1}} and so on',
        [F, content(" and so on")],
    ),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}\n{"name": "f", "parameters": {}}\n', [F, EMPTY]),
    ("llama3", '[{"name": "f", "parameters": {"a": 1}}, {"name": "f"}] Done.', [F, EMPTY, content(" Done.")]),
    (
        "llama3",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "Bob"}',
        [F, content(' {"name": "Bob"}')],
    ),
    ("llama3", '{"answer": [1, 2]}', [content('{"answer": [1, 2]}')]),
    ("llama3", '{"name": "f", "parameters": {', [content('{"name": "f", "parameters": {')]),
    ("llama3", '<|python_tag|>print("x")', [content('<|python_tag|>print("x")')]),
    ("llama3", "Hello {name}", [content("Hello {name}")]),
    # --- mistral
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]', [F, EMPTY]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', [F]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]' + WEATHER_JSON, [F, WEATHER]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [F]),
    ("mistral", 'Sure.[TOOL_CALLS]f{"a": 1}', [content("Sure."), F]),
    ("mistral", "[TOOL_CALLS]f", [content("[TOOL_CALLS]f")]),
    ("mistral", "[TOOL_CALLS][]", [content("[TOOL_CALLS][]")]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, 3]',
        [F, content(", 3]")],
    ),
    ("mistral", "[TOOL_CALLS]f[ARGS]", [EMPTY]),
    ("mistral", "[TOOL_CALLS]f[ARGS]null[TOOL_CALLS]f[ARGS]{}\n\nSo.", [EMPTY, EMPTY, content("\n\nSo.")]),
    ("mistral", "[TOOL_CALL]", [content("[TOOL_CALL]")]),
    # --- pythonic
    ("pythonic", "[f(a=1)]", [F]),
    ("pythonic", " [f(a=1), f()]\n", [F, EMPTY]),
    ("pythonic", "[get_weather(city='S\u00e3o \"P\"', days=[1, 2.5, None])]", [WEATHER]),
    (
        "pythonic",
        '[f(a={"k": (1, -2), "b": True, "c": false}, b="]")]',
        [Call("f", '{"a": {"k": [1, -2], "b": true, "c": false}, "b": "]"}')],
    ),
    ("pythonic", '[f(**{"a": 1})]', [F]),
    ("pythonic", "<|python_tag|>[f(a=1)]", [F]),
    ("pythonic", "[1, 2, 3]", [content("[1, 2, 3]")]),
    ("pythonic", "[g(a=1)]", [content("[g(a=1)]")]),
    ("pythonic", "[f(a=__import__('os'))]", [content("[f(a=__import__('os'))]")]),
    ("pythonic", "[f(1)]", [content("[f(1)]")]),
    ("pythonic", "[f(a=1)] is it", [F, content(" is it")]),
    ("pythonic", "[f(a=1", [content("[f(a=1")]),
    ("pythonic", "[f(a=" + "[" * 100 + "]" * 100 + ")]", [content("[f(a=" + "[" * 100 + "]" * 100 + ")]")]),
    ("pythonic", "Hello [f(a=1)]", [content("Hello [f(a=1)]")]),
    # --- deepseek
    ("deepseek", ALL_BEGIN + v3("f", '{"a": 1}') + ALL_END, [F]),
    (
        "deepseek",
        "Hm." + ALL_BEGIN + v3("f", '{"a": 1}') + "\n" + v3("get_weather", WEATHER_JSON) + ALL_END,
        [content("Hm."), F, WEATHER],
    ),
    ("deepseek", f'{ALL_BEGIN}{BEGIN}f{SEPARATOR}{{"a": 1}}{END}{BEGIN}f{SEPARATOR}{{}}{END}{ALL_END}', [F, EMPTY]),
    ("deepseek", f'{ALL_BEGIN}{BEGIN}f{SEPARATOR}{{"a": 1}}', [F]),
    (
        "deepseek",
        f"{ALL_BEGIN}{BEGIN}f{SEPARATOR}1{END}{ALL_END}",
        [content(f"{ALL_BEGIN}{BEGIN}f{SEPARATOR}1{END}{ALL_END}")],
    ),
    ("deepseek", f"{ALL_BEGIN}{BEGIN}f{SEPARATOR}{END}{ALL_END}", [EMPTY]),
    ("deepseek", f"{ALL_BEGIN}{v3('f', '')}{ALL_END}", [EMPTY]),
    ("deepseek", f"{v3('f', '{}')}", [EMPTY]),
    ("deepseek", f"{ALL_BEGIN}{v3('f', '{}')}{ALL_END}\nSo.", [EMPTY, content("\nSo.")]),
    ("deepseek", f"{ALL_BEGIN}{ALL_END}", [content(f"{ALL_BEGIN}{ALL_END}")]),
    ("inside, deepseek", "So.</think>\n\n" + ALL_BEGIN + v3("f", '{"a": 1}') + ALL_END, [thought("So."), F]),
    # --- harmony
    ("harmony", "<|channel|>final<|message|>Hello\n", [content("Hello\n")]),
    ("harmony", analysis("Hm.") + "<|channel|>final<|message|>Hello<|return|>", [thought("Hm."), content("Hello")]),
    (
        "harmony",
        analysis("Hm.") + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [thought("Hm."), F],
    ),
    ("harmony", ' to=functions.f<|channel|>commentary<|constrain|>json<|message|>{"a":1}', [Call("f", '{"a":1}')]),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", [EMPTY]),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>", [EMPTY]),
    (
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        [content("I will look."), F],
    ),
    ("harmony", "<|channel|>commentary to=functions.f json<|message|>not JSON", [content("not JSON")]),
    ("harmony", "<|channel|>analysis to=browser.search code<|message|>q<|call|>", [thought("q")]),
    ("harmony", "<|channel|>ana", []),
    ("harmony", "<|channel|>commentary to=functions.f<|call|>", [EMPTY]),
    (
        "harmony",
        '<|channel|>analysis<|message|>Hm.<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
        [thought("Hm."), F],
    ),
    ("harmony", "plain", [content("plain")]),
    # --- reasoning
    ("think", "<think>a\nb</think>\n\nHello", [thought("a\nb"), content("Hello")]),
    ("think", "\n<think>\na</think>Hello", [thought("a"), content("Hello")]),
    ("think", "Hello <think>x</think>", [content("Hello <think>x</think>")]),
    ("think", "<think>never ends </thin", [thought("never ends </thin")]),
    ("think", "<thinking>", [content("<thinking>")]),
    ("think", "", []),
    ("think", " \n", [content(" \n")]),
    ("inside", "a</think>\n b </think>", [thought("a"), content("b ")]),
    ("inside", "a</think></think>\n</think>b", [thought("a"), content("b")]),
    ("inside", "</think>b", [content("b")]),
    ("inside", "<think><think>a</think>b", [thought("a"), content("b")]),
    ("think", "<think>a</think>\n<think>b</think>c", [thought("ab"), content("c")]),
    ("think", "a\n</think>\n\nb", [content("a\n\n\nb")]),
    ("think", "It ends with `</think>`.", [content("It ends with `</think>`.")]),
    ("think, hermes", f"<think>{IN_THOUGHT}", [thought("I call.\n"), F]),
    ("inside, hermes", f"{IN_THOUGHT}\n{IN_THOUGHT[8:]}\n", [thought("I call.\n"), F, F]),
    ("inside, hermes", f"{IN_THOUGHT}</think>", [thought(IN_THOUGHT)]),
    ("inside, hermes", f"{IN_THOUGHT} Or not?", [thought(f"{IN_THOUGHT} Or not?")]),
    ("inside, hermes", f"{IN_THOUGHT}\n</think>{IN_THOUGHT}", [thought(f"{IN_THOUGHT}\n"), content("I call."), F]),
    ("inside, hermes", IN_THOUGHT[:-14], [thought(IN_THOUGHT[:-14])]),
    ("inside", "<think>a</think>b", [thought("a"), content("b")]),
    (
        "think, hermes",
        '<think>I use <tool_call></think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        [thought("I use <tool_call>"), F],
    ),
    ("think, hermes", "<think></think>\nHi", [content("Hi")]),
]


def parse(format: str, texts: list[str]) -> list[Piece]:
    """What a message is made of that comes in these pieces; neighbours of one kind are joined."""
    parser = MessageParser(FORMATS[format])
    return joined([piece for text in texts for piece in parser.push(text)] + parser.finish())


def joined(pieces: list[Piece]) -> list[Piece]:
    """``pieces`` with neighbours of one kind as one, and without the progress of calls, which has to add up to them."""
    result: list[Piece] = []
    name, progress = "", None
    for piece in pieces:
        if isinstance(piece, CallProgress):
            name, progress = piece.name, (progress or "") + piece.text
            continue
        if isinstance(piece, Call) and progress is not None:
            assert (name, progress) == piece[:2]
            progress = None
        assert progress is None, "a call was begun that never ended"
        last = result[-1] if result else None
        if isinstance(piece, Text) and isinstance(last, Text) and last.kind == piece.kind:
            result[-1] = Text(piece.kind, last.text + piece.text)
        else:
            result.append(piece)
    return result
