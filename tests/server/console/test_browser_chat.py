"""The console in Chromium: the chat. `make test-browser`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.console.conftest import PHONE, says
from tests.server.in_process import InProcessEngine, byte_tokenizer
from tests.server.test_images import CONFIG, GREEN, RED, SPECIAL, TEMPLATE, SeeingEngine, url

HOSTILE = (
    "<img src=x onerror=alert(1)> ![p](https://a.example/p.png) [no](javascript:alert(1)) [yes](https://a.example)\n"
)
MARKDOWN = (
    HOSTILE
    + """
```python
def one() -> int: return 1
```

| a | b |
|---|---|
| 1 | 2 |

| c |
|---|
| 3 |

- one
- **two**

It costs $5 or $6, and $x^2$.
"""
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
GIVE = """(node, [kind, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "green.png", { type: "image/png" }));
  const about = { bubbles: true, cancelable: true };
  if (kind === "paste") node.dispatchEvent(new ClipboardEvent(kind, { ...about, clipboardData: data }));
  else node.dispatchEvent(new DragEvent(kind, { ...about, dataTransfer: data }));
}"""
"""Pastes or drops a file."""

KEEPS = """async (texts) => {
  const { result } = await new Promise((done) => {
    const opening = indexedDB.open("octavo", 1);
    opening.onsuccess = () => {
      const store = opening.result.transaction("conversations").objectStore("conversations");
      store.getAll().onsuccess = (event) => done(event.target);
    };
  });
  const kept = Object.values(result[0].messages).map((each) => each.text);
  return texts.length === kept.length && texts.every((text) => kept.includes(text));
}"""
"""Whether the browser keeps a conversation of messages with these texts."""

SIZES = pytest.mark.parametrize("options", [{}, {**PHONE, "color_scheme": "dark"}], ids=["desktop", "phone"])


def open_settings(page: Any) -> None:
    page.locator("#settings > summary").click()


def test_an_answer_is_markdown_and_no_html(visit: Any) -> None:
    opened = visit(InProcessEngine(says(MARKDOWN)), permissions=["clipboard-read", "clipboard-write"])
    page = opened.page
    opened.ask("Hi")
    answer = page.locator(".message.assistant .text")
    page.wait_for_selector(".hljs-keyword")
    page.wait_for_selector(".katex")
    assert answer.locator("img").count() == 0
    assert "<img src=x" in answer.inner_text()
    assert answer.locator("a[href]").evaluate_all("all => all.map((each) => each.getAttribute('href') + each.rel)") == [
        "https://a.example/p.pngnoopener noreferrer",
        "https://a.examplenoopener noreferrer",
    ]
    assert answer.locator("td").all_inner_texts() == ["1", "2", "3"]
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert "$5 or $6" in answer.inner_text()
    assert answer.locator("pre").inner_text().strip() == "def one() -> int: return 1"
    for button, copied in (("Copy the message", MARKDOWN), ("Copy code", "def one() -> int: return 1")):
        page.click(f"[aria-label='{button}'] >> nth=-1")
        page.wait_for_selector("text=Copied")
        assert page.evaluate("navigator.clipboard.readText()").strip() == copied.strip()
    assert f"+ {len(MARKDOWN) + 1} tokens" in page.inner_text(".message .about")
    opened.check()


def test_formulas_and_code_are_told_from_other_text(visit: Any) -> None:
    opened = visit(InProcessEngine())
    found = opened.page.evaluate(
        """async () => {
          const { GrowingText, rendered } = await import("/console/markdown.js");
          const box = document.createElement("div"), growing = new GrowingText(box);
          growing.show("$$x$$", false);
          while (!box.querySelector(".katex")) await new Promise((done) => setTimeout(done, 10));
          growing.show("$$x$$\\n\\nMore", false);
          const plain = rendered("```\\nselect 1 from a\\n```");
          await import("/console/vendor/highlight/languages/sql.min.js");
          await new Promise((done) => setTimeout(done, 50)); // colours come later
          const count = (text, selector) => rendered(text).querySelectorAll(selector).length;
          return [
            box.querySelectorAll(".katex-display").length,
            count("It has $$ in it\\nand \\\\[ too", "p"),
            count("a\\n\\\\[x\\\\]\\nb", ".katex-display"),
            plain.querySelectorAll("[class^=hljs]").length,
            count("[a](#here) [b](data:text/html,x)", "a"),
          ];
        }"""
    )
    assert found == [1, 1, 1, 0, 0]
    opened.check()


def test_json_gets_line_ends_and_keeps_its_numbers(visit: Any) -> None:
    text = '{"a": 123456789012345678901234567890, "b": [], "c": [1.10, "x: {y}"]}'
    opened = visit(InProcessEngine(says(text)))
    opened.ask("Hi")
    shown = opened.page.locator(".message.assistant pre").inner_text().strip()
    assert (
        shown
        == """{
  "a": 123456789012345678901234567890,
  "b": [],
  "c": [
    1.10,
    "x: {y}"
  ]
}"""
    )
    opened.check()


@pytest.mark.timing
def test_a_page_with_20000_tokens_has_60_frames_a_second(visit: Any) -> None:
    opened = visit(InProcessEngine())
    frames = opened.page.evaluate(
        """async (text) => {
          const { MessageView } = await import("/console/message_view.js");
          const list = document.getElementById("messages");
          const nothing = { siblings: () => ({ count: 1 }), wantsResult: () => false, canGoOn: () => false };
          const message = { role: "assistant", text: text.repeat(Math.ceil(80000 / text.length)) };
          const view = new MessageView(message, nothing);
          view.isStreaming = true;
          list.append(view.node);
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          const times = [];
          view.draw();
          for (let wait = 0; wait < 30; wait += 1) await frame();
          for (let last = await frame(), end = last + 3000; last < end;) {
            message.text += text.slice(times.length % text.length).slice(0, 30);
            view.draw();
            list.scrollTop = list.scrollHeight;
            const now = await frame();
            times.push(now - last);
            last = now;
          }
          return times.sort((one, other) => one - other);
        }""",
        MARKDOWN,
    )
    assert len(frames) > 150
    assert frames[int(len(frames) * 0.95)] < 20
    assert not opened.problems  # axe-core takes a minute for so much


def test_a_streamed_text_ends_as_if_it_had_come_at_once(visit: Any) -> None:
    opened = visit(InProcessEngine())
    same = opened.page.evaluate(
        """async (text) => {
          const { GrowingText, rendered } = await import("/console/markdown.js");
          const box = document.createElement("div"), growing = new GrowingText(box);
          for (let end = 1; end <= text.length; end += 1) growing.show(text.slice(0, end), false);
          growing.show(text, true);
          const plain = (node) => node.innerHTML.replace(/<span class="hljs[^>]*>|<span class="math[\\s\\S]*$/g, "");
          return plain(box) === plain(rendered(text));
        }""",
        MARKDOWN.replace("| 1", "1. a\n\n2. b\n\n\n```\ncode\n\n~~~\n```\nx\r\n\r\ny\n\n| 1"),
    )
    assert same
    opened.check()


def test_a_long_answer_redraws_its_end_alone(visit: Any) -> None:
    opened = visit(InProcessEngine())
    counts = opened.page.evaluate(
        """async () => {
          const { GrowingText } = await import("/console/markdown.js");
          const box = document.createElement("div"), growing = new GrowingText(box);
          const text = "Some words of a *paragraph*.\\n\\n- an item\\n- another\\n\\n".repeat(1500);
          growing.show(text, false);
          const touched = (more) => {
            const watcher = new MutationObserver(() => {});
            watcher.observe(box, { childList: true, characterData: true, subtree: true });
            growing.show(more, false);
            return watcher.takeRecords().flatMap((each) => [...each.addedNodes, ...each.removedNodes]).length;
          };
          const code = text + "```python\\n" + "x = 1\\n".repeat(5000);
          return [box.querySelectorAll("p, ul").length, touched(text + "More"), touched(code), touched(code + "y = 2")];
        }"""
    )
    assert counts[0] == 3000
    assert counts[1] < 20
    assert counts[3] == 0  # a piece is appended to the node that is there
    opened.check()


def test_an_answer_can_be_stopped_and_go_on(visit: Any) -> None:
    engine = InProcessEngine(says("Once upon a time"), runs=False)
    opened = visit(engine)
    page = opened.page
    opened.say("Tell me a story.")
    opened.until(lambda: engine.num_live == 1)
    for _ in range(4):
        opened.served.call(engine.step)
    page.wait_for_selector(".message.assistant p:text('Once')")
    page.keyboard.press("Escape")
    opened.until(lambda: len(engine.aborted) == 1)
    opened.answered()
    assert "stopped" in page.inner_text(".message .about")
    engine.answer = says(" upon a time.")
    engine.runs = True
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("text=Continue")
    assert sent.value.post_data_json["continue_final_message"] is True
    assert sent.value.post_data_json["messages"][-1] == {"role": "assistant", "content": "Once"}
    page.wait_for_selector(".message.assistant p:text('Once upon a time.')")
    opened.answered()
    opened.check()


def test_what_a_reload_cuts_off_is_kept_and_can_go_on(visit: Any) -> None:
    engine = InProcessEngine(says("Once upon a time"), runs=False)
    opened = visit(engine)
    page = opened.page
    opened.say("Tell me a story.")
    opened.until(lambda: engine.num_live == 1)
    for _ in range(4):
        opened.served.call(engine.step)
    page.wait_for_selector(".message.assistant p:text('Once')")
    page.reload()
    page.click("#conversations .title")
    page.wait_for_selector(".message.assistant p:text('Once')")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("text=Continue")
    assert sent.value.post_data_json["messages"][-1] == {"role": "assistant", "content": "Once"}
    opened.check()


def test_conversations_are_kept_found_renamed_and_deleted(visit: Any) -> None:
    opened = visit(InProcessEngine(says("A fine answer.")))
    page = opened.page
    for number, text in enumerate(("First things", "Second things")):
        if number:
            page.click("#reset")
            assert page.locator(".message").count() == 0
        opened.ask(text)
    page.reload()
    titles = page.locator("#conversations .title")
    titles.nth(1).wait_for()
    assert titles.all_inner_texts() == ["Second things", "First things"]
    page.fill("#search", "first")
    titles.first.click()
    page.wait_for_selector(".message.assistant p:text('A fine answer.')")
    page.click("text=Rename")
    page.keyboard.type("Another name")
    page.keyboard.press("Enter")
    page.fill("#search", "")
    page.wait_for_selector("#conversations >> text=Another name")
    page.locator("#conversations >> text=Delete").click()
    page.wait_for_selector("text=“Another name” is deleted.")
    assert titles.all_inner_texts() == ["Second things"]
    page.click("text=Undo")
    page.wait_for_selector("#conversations >> text=Another name")
    opened.check()


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_away(visit: Any) -> None:
    engine = InProcessEngine(says("Once"), runs=False)
    opened = visit(engine)
    opened.say("Hi")
    opened.until(lambda: engine.num_live == 1)
    opened.page.locator("#conversations >> text=Delete").click()
    opened.until(lambda: len(engine.aborted) == 1)
    opened.page.wait_for_selector("text=is deleted.")
    opened.page.reload()
    opened.page.wait_for_selector("#history-empty:text('No chats yet.')")
    opened.check()


def test_two_tabs_show_the_same_conversation(visit: Any) -> None:
    opened = visit(InProcessEngine(says("One.", "Two.")))
    opened.ask("First")
    other = opened.context.new_page()
    other.goto(opened.served.url)
    other.click("#conversations .title")
    opened.ask("Second", 2)
    other.wait_for_selector(".message.assistant p:text('Two.')")
    other.fill("#prompt", "Third")
    with other.expect_request("**/v1/chat/completions") as sent:
        other.click("#send")
    assert [each["content"] for each in sent.value.post_data_json["messages"]] == [
        "First",
        "One.",
        "Second",
        "Two.",
        "Third",
    ]
    opened.page.wait_for_selector(".message.user .text:text('Third')")
    opened.check()


def test_two_tabs_that_answer_in_one_conversation_keep_both_answers(visit: Any) -> None:
    engine = InProcessEngine(says("One.", "Two.", "Three."))
    opened = visit(engine)
    opened.ask("First")
    other = opened.context.new_page()
    other.goto(opened.served.url)
    other.click("#conversations .title")
    engine.runs = False
    for page, text in ((opened.page, "Second"), (other, "Third")):
        page.fill("#prompt", text)
        with page.expect_request("**/v1/chat/completions"):
            page.click("#send")
    opened.until(lambda: engine.num_live == 2)
    while engine.num_live:
        opened.served.call(engine.step)
    for page in (opened.page, other):
        page.wait_for_selector("#stop", state="hidden")
    opened.until(lambda: other.evaluate(KEEPS, ["First", "Second", "Third", "One.", "Two.", "Three."]))
    opened.check()


def test_the_other_tab_does_not_take_back_what_an_answer_went_on_with(visit: Any) -> None:
    opened = visit(InProcessEngine(says("Unused")))
    choices = [{"delta": {"content": "Once"}}, {"delta": {"content": "."}, "finish_reason": "stop"}]
    bodies = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    kind = {"content-type": "text/event-stream"}
    opened.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=bodies.pop(0), headers=kind))
    opened.ask("First")
    other = opened.context.new_page()
    other.goto(opened.served.url)
    other.click("#conversations .title")
    other.wait_for_selector(".message.assistant:has-text('The answer ended before it was complete.')")
    opened.page.click("text=Continue")  # which takes that away, so that the message is smaller
    other.wait_for_selector(".message.assistant p:text('Once.')")
    opened.check()


def test_a_conversation_that_another_tab_deletes_and_keeps_again_goes_on(visit: Any) -> None:
    engine = InProcessEngine(says("Answer."), runs=False)
    opened = visit(engine)
    opened.say("First")
    opened.until(lambda: engine.num_live == 1)
    other = opened.context.new_page()
    other.goto(opened.served.url)
    other.click("#conversations .title")
    other.click("#conversations >> text=Delete")
    opened.page.wait_for_selector("#history-empty:text('No chats yet.')")
    other.click("text=Undo")
    opened.page.wait_for_selector("#conversations .title")
    while engine.num_live:
        opened.served.call(engine.step)
    opened.until(lambda: other.evaluate(KEEPS, ["First", "Answer."]))
    opened.check()


def test_conversations_leave_and_come_back_as_files(visit: Any, tmp_path: Path) -> None:
    opened = visit(InProcessEngine(says("**Four.**")))
    page = opened.page
    opened.ask("Two and two?")
    files = []
    for button in ("#conversations >> text=Markdown", "#export-all"):
        with page.expect_download() as saved:
            page.click(button)
        files.append(tmp_path / saved.value.suggested_filename)
        saved.value.save_as(files[-1])
    assert files[0].read_text() == "# Two and two?\n\n## You\n\nTwo and two?\n\n## Answer of test\n\n**Four.**\n"
    page.locator("#conversations >> text=Delete").click()
    (tmp_path / "bad.json").write_text(json.dumps({"format": "octavo conversations", "version": 9}))
    for path, said in ((files[1], "1 chat imported."), (tmp_path / "bad.json", "'version' must be 1.")):
        page.set_input_files("#import-files", path)
        page.wait_for_selector(f"#history-state >> text={said}")
    page.click("#conversations .title")
    page.wait_for_selector(".message.assistant strong:text('Four.')")
    opened.check()


def test_a_refused_message_stays_and_can_be_sent_again(visit: Any) -> None:
    opened = visit(InProcessEngine(says("Hello Ann.")))
    page = opened.page
    open_settings(page)
    page.fill("#max_tokens", "999999")
    opened.ask("My name is Ann.")
    assert "512 tokens" in page.inner_text(".message.assistant .error")
    page.fill("#max_tokens", "")
    page.click("text=Try again")
    page.wait_for_selector("text=Hello Ann.")
    page.wait_for_selector("text=2 / 2")
    page.reload()
    page.click("#conversations .title")
    assert opened.ask("What is my name?", 2)["messages"][0] == {"role": "user", "content": "My name is Ann."}
    opened.problems = [problem for problem in opened.problems if "400" not in problem]
    opened.check()


def test_a_wrong_setting_is_named_and_nothing_is_lost(visit: Any) -> None:
    opened = visit(InProcessEngine())
    page = opened.page
    for field, value, said in (
        ("temperature", "5", "Temperature must be at least 0 and at most 2."),
        ("schema", "{", "JSON schema of the answer: "),
    ):
        page.locator(f"#{field}").evaluate("(node, value) => { node.value = value }", value)
        opened.say("Hi")
        assert said in page.inner_text("#settings-problem")
        assert page.input_value("#prompt") == "Hi"
        assert page.evaluate("document.activeElement.id") == field or field == "schema"
        page.locator(f"#{field}").evaluate("(node) => { node.value = '' }")
    opened.check()


def test_editing_and_regenerating_make_branches(visit: Any) -> None:
    opened = visit(InProcessEngine(says("One.", "Two.", "Three.", "Four.")))
    page = opened.page
    opened.ask("Count.")
    page.click("text=Regenerate")
    page.wait_for_selector(".message.assistant >> text=Two.")
    assert opened.ask("Go on.", 2)["messages"][1]["content"] == "Two."
    page.locator(".message.assistant").first.locator("[aria-label='Earlier version']").click()
    assert page.locator(".message").count() == 2
    page.click(".message.user >> text=Edit")
    page.fill(".editor textarea", "Count again.")
    page.click(".editor >> text=Send")
    page.wait_for_selector(".message.assistant >> text=Four.")
    page.wait_for_selector(".message.user .text:text('Count again.')")
    page.locator(".message.user [aria-label='Earlier version']").click()
    page.wait_for_selector(".message.assistant p:text('One.')")
    page.click(".message.user >> text=Delete")
    page.wait_for_selector(".message.user .text:text('Count again.')")
    page.click("#chat-note >> text=Undo")
    page.wait_for_selector(".message.user >> text=1 / 2")
    opened.check()


def test_pictures_and_texts_are_attached(visit: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = SeeingEngine()
    settings = {"model": str(tmp_path), "served_model_name": "eyes"}
    opened = visit(engine, settings, byte_tokenizer(TEMPLATE, SPECIAL))
    page = opened.page
    page.set_input_files(
        "#attach-files",
        [
            {"name": "red.png", "mimeType": "image/png", "buffer": RED},
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"a ``` fence"},
            {"name": "blob.bin", "mimeType": "", "buffer": b"\xff\0"},
        ],
    )
    page.wait_for_selector("#attachments >> text=blob.bin: this is neither")
    for count, (kind, target) in enumerate((("paste", "#prompt"), ("drop", "#messages")), 2):
        page.locator(target).evaluate(GIVE, [kind, list(GREEN)])
        page.wait_for_selector(f"#attachments img >> nth={count - 1}")
    page.click("[aria-label='Remove picture 3']")
    content = opened.ask("What is it?")["messages"][0]["content"]
    assert [each["image_url"]["url"] for each in content[:-1]] == [url(RED), url(GREEN)]
    assert content[-1]["text"] == "What is it?\n\nnotes.txt:\n````\na ``` fence\n````"
    assert page.locator(".message.user img").count() == 2
    assert page.inner_text(".message.assistant p").startswith("A picture.")
    assert len(engine.seen[0].images) == 2
    opened.check()


def test_a_picture_is_refused_for_a_model_without_eyes(visit: Any) -> None:
    opened = visit(InProcessEngine())
    opened.page.set_input_files("#attach-files", {"name": "red.png", "mimeType": "image/png", "buffer": RED})
    opened.page.wait_for_selector("#attachments >> text=red.png: test does not take pictures.")
    opened.check()


@SIZES
def test_models_answer_side_by_side(visit: Any, options: dict[str, Any]) -> None:
    opened = visit(InProcessEngine(says("Left.", "Right.")), {"served_model_name": "one,two"}, **options)
    page = opened.page
    open_settings(page)
    page.check("#beside >> text=two")
    opened.say("Hi")
    opened.answered(2)
    assert page.locator(".column p:not(.about)").all_inner_texts() == ["Left.", "Right."]
    page.click("text=Go on with this one")
    page.uncheck("#beside >> text=two")
    assert opened.ask("And?", 3)["messages"][1]["content"] == "Right."
    opened.check()


@SIZES
def test_probabilities_of_tokens(visit: Any, options: dict[str, Any]) -> None:
    opened = visit(InProcessEngine(says("abc")), **options)
    page = opened.page
    open_settings(page)
    page.check("#probabilities")
    assert opened.ask("Hi")["top_logprobs"] == 5
    page.click(".actions >> text=Probabilities")
    assert page.locator(".tokens span").all_inner_texts()[:3] == ["a", "b", "c"]
    page.hover(".tokens span:nth-child(1)")
    page.wait_for_selector(".card tr:nth-child(5)")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert page.locator(".card .chosen").inner_text().split() == ["b", "91", "%"]
    opened.check()


@SIZES
def test_reasoning_is_folded_and_calls_get_their_results(visit: Any, options: dict[str, Any]) -> None:
    engine = InProcessEngine(says(f"<think>Hm, weather.</think>{CALL}", "Sunny."), max_model_len=4096)
    opened = visit(engine, {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}, **options)
    page = opened.page
    open_settings(page)
    page.click("text=Tools >> nth=0")
    page.fill("#tools", json.dumps(TOOLS))
    opened.ask("Weather in Rome?")
    assert not page.is_visible(".thoughts")
    page.click(".reasoning summary")
    assert page.inner_text(".thoughts") == "Hm, weather."
    assert "weather" in page.inner_text(".call summary")
    page.fill("[aria-label='Result of weather']", "25 degrees")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("text=Give the result")
    call, result = sent.value.post_data_json["messages"][-2:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "25 degrees"}
    page.wait_for_selector(".message.assistant >> text=Sunny.")
    opened.check()


@SIZES
def test_presets_and_the_schema_editor(visit: Any, options: dict[str, Any]) -> None:
    opened = visit(InProcessEngine(), **options)
    page = opened.page
    open_settings(page)
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.click("text=An answer in JSON")
    page.click("#add-field")
    page.fill("[aria-label='Name of the field']", "colour")
    page.select_option("[aria-label='Type of the field']", "one of")
    page.fill("[aria-label='Values, with commas between']", "red, blue")
    schema = json.loads(page.input_value("#schema"))
    assert schema["properties"] == {"colour": {"enum": ["red", "blue"]}}
    page.fill("#preset-name", "brief")
    page.click("text=Save as preset")
    page.select_option("#preset", "")
    assert page.input_value("#system") == ""
    page.reload()
    open_settings(page)
    page.select_option("#preset", "brief")
    assert page.inner_text("#settings-set") == ": System prompt, JSON schema of the answer, Temperature 0.5"
    body = opened.ask("Hi")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["temperature"] == 0.5
    assert body["response_format"]["json_schema"]["schema"] == schema
    opened.check()


def test_a_server_that_is_gone_is_said_so(visit: Any) -> None:
    engine = InProcessEngine(says("Once upon"), runs=False)
    opened = visit(engine, **PHONE)
    page = opened.page
    opened.say("Hi")
    opened.until(lambda: engine.num_live == 1)
    for _ in range(4):
        opened.served.call(engine.step)
    page.wait_for_selector(".message.assistant p:text('Once')")
    opened.stop_server()
    page.wait_for_selector(".message .error")
    page.wait_for_selector(".message .text p:text('Once')")
    page.wait_for_selector("#state.bad")
    assert "does not answer" in page.inner_text("#state")
    opened.problems.clear()
    opened.check()
