"""Test the page of the recorder in Chromium."""

from contextlib import ExitStack

import pytest
import recorders

from topr_trl.recording.store import State, StorageFullError, Store

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
expect = sync_api.expect

pytestmark = pytest.mark.slow
TIMEOUT = 8_000  # in ms, longer than the time between two polls of the page
ATTACK = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


class Recorder:
    """A recorder in a thread. The test writes to the same database."""

    def __init__(self, folder):
        self._running = ExitStack()
        running = self._running.enter_context(recorders.recorder(folder, upstream="http://127.0.0.1:9/v1"))
        self.served, self.url, self.store = running.store, f"{running.address}/", Store(folder)
        self.stop = self._running.close

    def add(self, name, *messages, answer="Fine.", state=State.FINISHED, error=None, tools=None):
        """Record a call. Text stands for a message of a user or for the content of an answer."""
        turns = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        request = {"model": "tiny", "messages": turns, "tools": tools}
        call = self.store.begin("chat/completions", request, name, 1)
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}] if message else []
        self.store.end(call.id, state, {"choices": choices}, error=error)
        return turns, message

    def grade(self, name, answer=1):
        """Return the rating of an answer, or of the whole rollout if `answer` is 0, and its comment."""
        found = self.store.rollout(name)
        graded = found["calls"][answer - 1] if answer else found
        return graded["rewards"].get("rating"), graded["comments"].get("rating")


@pytest.fixture
def recorder(tmp_path):
    found = Recorder(tmp_path)
    yield found
    found.stop()
    found.store.close()


@pytest.fixture
def page(browser, recorder):
    """Yield a page, and check at the end that it had no unexpected errors, such as violations of the security policy.

    The page depends on the recorder, so that it closes before the server stops. Otherwise, a poll could be refused.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(10_000)  # ms
    context.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) => console.error(event.violatedDirective))"
    )
    found, problems = context.new_page(), []
    found.expected = []  # parts of the errors that a test causes
    found.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: problems.append(str(error)))
    yield found
    found.evaluate("0")  # The answer comes after all messages that the page has sent.
    unexpected = [each for each in problems if not any(part in each for part in found.expected)]
    context.close()  # A poll that is cut here can send another message.
    assert not unexpected


def rows(page):
    return page.locator("#rows a")


def pressed(page):
    return [
        button.get_attribute("aria-label") for button in page.locator("#grade [data-reward][aria-pressed=true]").all()
    ]


def open_rollout(page, recorder, name):
    page.goto(f"{recorder.url}#{name}")
    expect(page.locator("#name")).to_have_text(name)
    expect(page.locator("#grade")).to_be_visible()


def test_list_and_filter(page, recorder):
    recorder.add("a", "First question\nmore", answer="First answer\nmore")
    recorder.add("b", "Refused", answer=None, state=State.FAILED, error="No such model.")
    called = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    parts = {"role": "user", "content": [{"type": "text", "text": "Parts"}]}
    recorder.add("c", parts, answer={"role": "assistant", "content": None, "tool_calls": called})
    recorder.store.set_reward("a", "verifier", 0.25)
    recorder.store.set_reward("a", "rating", 1)
    recorder.store.set_reward("c", "verifier", 0.5)
    page.goto(recorder.url)
    expect(rows(page)).to_have_count(3)
    expect(page.locator("#totals")).to_have_text("3 rollouts, 2 with a reward, 1 graded (reward “rating”)")
    newest, middle, oldest = rows(page).all()
    expect(newest).to_contain_text("Parts")
    expect(newest).to_contain_text("calls look")
    expect(middle).to_contain_text("failed")
    expect(middle).to_contain_text("(no answer)")
    for text in ("tiny", "First question", "First answer", "verifier +0.25"):
        expect(oldest).to_contain_text(text)
    assert "more" not in oldest.inner_text()
    page.get_by_role("button", name="Graded", exact=True).click()
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("First question")
    page.get_by_role("button", name="Not graded").click()
    expect(rows(page)).to_have_count(1)  # A failed call has no answer to grade.
    expect(rows(page)).to_contain_text("Parts")
    expect(page.get_by_role("button", name="Not graded")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="All").click()
    expect(rows(page)).to_have_count(3)


def test_plot_or_how_to_grade(page, recorder):
    page.goto(recorder.url)
    expect(page.locator("#empty")).to_contain_text(f"{recorder.url}v1")
    recorder.add("a", "Hi")
    recorder.add("b", "Hi")
    page.reload()
    expect(page.get_by_text("Nothing is graded yet.")).to_be_visible()
    expect(page.locator("#plot circle")).to_have_count(0)
    height = rows(page).first.bounding_box()["y"]
    for name, reward in (("a", -1), ("b", 0.5)):
        recorder.store.set_reward(name, "rating", reward)
        recorder.store.set_reward(name, "verifier", 2 * reward)
    page.reload()
    expect(page.locator("#plot circle")).to_have_count(2)
    expect(page.locator("#plot")).to_contain_text("−1")
    expect(page.get_by_text("Nothing is graded yet.")).to_be_hidden()
    assert rows(page).first.bounding_box()["y"] == height  # The first grade moves no row.
    page.locator("#reward").select_option("verifier")
    expect(page.locator("#plot")).to_contain_text("−2")
    expect(page.locator("#caption")).to_contain_text("verifier")


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"marker": "of a tool"}}}]


def trajectory(recorder, name="task"):
    """Record two calls, of which the second continues the first without its reasoning."""
    function = {"name": "look", "arguments": '{"at": 12345678901234567,"n":1.0}'}
    called = [{"id": "1", "type": "function", "function": function}]
    first = {"role": "assistant", "content": None, "reasoning_content": "I should look.", "tool_calls": called}
    system = {"role": "system", "content": "Secret policy"}
    turns, _ = recorder.add(name, system, "Where is it?", answer=first, tools=TOOLS)
    without = {key: value for key, value in first.items() if key != "reasoning_content"}
    result = {"role": "tool", "tool_call_id": "1", "content": "Gate 7"}
    return recorder.add(name, *turns, without, result, answer="It is at gate 7.", tools=TOOLS)


def test_thinking_in_parts_is_reasoning(page, recorder):
    """Mistral's API writes thinking into the content, and an application can leave it out of the history."""
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    answer = {"role": "assistant", "content": [thinking, {"type": "text", "text": "42."}]}
    turns, _ = recorder.add("task", "How many?", answer=answer)
    recorder.add("task", *turns, {"role": "assistant", "content": "42."}, "Sure?", answer="Yes.")
    page.goto(recorder.url)
    rows(page).click()
    shown = page.locator("#conversation")
    expect(shown.locator(".turn.own")).to_have_count(2)
    assert shown.locator("h3").count() == 0, "the calls are one conversation"
    expect(shown.locator(".turn.own > .text").first).to_have_text("42.")
    shown.locator("summary", has_text="Reasoning").click()
    expect(shown.locator("details .text")).to_have_text("Hm.")


def test_opened_rollout_is_one_conversation_with_folded_parts(page, recorder):
    trajectory(recorder)
    page.goto(recorder.url)
    rows(page).click()
    expect(page).to_have_url(f"{recorder.url}#task")
    shown = page.locator("#conversation")
    expect(shown.locator(".turn.own")).to_have_count(2)
    expect(shown.locator(".turn.own").nth(1)).to_contain_text("It is at gate 7.")
    expect(shown.get_by_text("Where is it?")).to_be_visible()
    assert shown.locator("h3").count() == 0, "the calls are one conversation"
    labels = [each.inner_text().split(":")[0] for each in shown.locator("summary").all()]
    assert labels == ["Tools", "System prompt", "Reasoning", "Tool call", "Result of look"]
    assert not shown.locator("details[open]").count()
    for label, content in (("System prompt", "Secret policy"), ("Reasoning", "I should look."),
                           ("Tool call", '"at": 12345678901234567, "n": 1.0'), ("Result of look", "Gate 7"),
                           ("Tools", "of a tool")):  # fmt: skip
        fold = shown.locator("details").filter(has=page.locator("summary", has_text=label))
        expect(fold.locator(".text")).to_be_hidden()
        fold.locator("summary").click()
        expect(fold.locator(".text")).to_be_visible()
        expect(fold.locator(".text")).to_contain_text(content)
    # Answers of the model have another color than messages that the application wrote.
    colors = [shown.locator(kind).first.evaluate("each => getComputedStyle(each).backgroundColor") for kind in
              (".turn.own", ".turn:not(.own)")]  # fmt: skip
    assert colors[0] != colors[1]


def test_calls_that_do_not_continue_are_shown_apart(page, recorder):
    recorder.add("retry", "Which planet?", answer=None, state=State.FAILED, error="Connection refused")
    recorder.add("retry", "Which planet?", answer="Jup", state=State.CUT, error="The client left.")
    example = {"role": "assistant", "content": "An example"}
    recorder.add("retry", "Another question", example, "And this?", answer="Yes.")
    open_rollout(page, recorder, "retry")
    shown = page.locator("#conversation")
    expect(shown.locator("h3")).to_have_text(["Call 1", "Call 2", "Call 3"])
    expect(shown.locator(".turn.own")).to_have_count(3)
    expect(shown.locator(".own").nth(0)).to_contain_text("The call failed. Connection refused")
    expect(shown.locator(".own").nth(1)).to_contain_text("Jup")
    expect(shown.locator(".own").nth(1)).to_contain_text("The answer was cut. The client left.")
    expect(shown.locator(".turn:not(.own)", has_text="An example")).to_contain_text("given as context")


def test_answers_do_not_run(page, recorder):
    called = [{"id": ATTACK, "type": "function", "function": {"name": ATTACK, "arguments": ATTACK}}]
    answer = {"role": ATTACK, "content": ATTACK, "reasoning": ATTACK, "tool_calls": called}
    turns = [{"role": role, "content": ATTACK, "name": ATTACK} for role in ("system", "user", "tool", ATTACK)]
    tools = [{"function": {"name": ATTACK}}]
    recorder.add(ATTACK, *turns, answer=answer, state=State.CUT, error=ATTACK, tools=tools)
    recorder.store.set_reward(ATTACK, ATTACK, 1, ATTACK)
    page.goto(recorder.url)
    expect(rows(page)).to_contain_text("<script>window.hacked=1</script>")
    rows(page).click()
    expect(page.locator("#conversation .own .text").filter(visible=True)).to_have_text(ATTACK)
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked === undefined")
    assert page.locator("main img, main script").count() == 0


def test_grade_by_mouse_and_keyboard(page, recorder):
    recorder.add("a", "Hi")
    open_rollout(page, recorder, "a")
    page.get_by_role("button", name="Thumbs down").click()
    expect(page.locator("#saved")).to_have_text("Reward −1 saved")
    assert recorder.grade("a") == (-1, None)
    assert pressed(page) == ["Thumbs down", "Score 1 of 5"]
    expect(rows(page)).to_contain_text("rating −1")
    expect(page.locator("#totals")).to_have_text("1 rollout, 1 graded (reward “rating”)")
    keys = {"1": -1, "2": -0.5, "3": 0, "4": 0.5, "5": 1, "d": -1, "u": 1, "-": -1, "+": 1}
    for key, reward in keys.items():
        page.keyboard.press(key)
        expect(page.locator("#saved")).to_have_text(f"Reward {reward:{'+' if reward else ''}} saved".replace("-", "−"))
        assert recorder.grade("a") == (reward, None)
        assert len(pressed(page)) == 1 + (abs(reward) == 1)


def test_comment(page, recorder):
    recorder.add("a", "Hi")
    recorder.add("b", "Hi")
    open_rollout(page, recorder, "a")
    comment = page.get_by_label("Comment")
    page.keyboard.press("c")
    expect(comment).to_be_focused()
    comment.press_sequentially("Before the grade")
    comment.press("Escape")
    assert recorder.grade("a") == (None, None)
    recorder.store.set_reward("b", "rating", 0)  # so that the page does not move on to it
    expect(rows(page).first).to_contain_text("rating 0", timeout=TIMEOUT)
    page.keyboard.press("4")
    expect(page.locator("#saved")).to_have_text("Reward +0.5 saved")
    assert recorder.grade("a") == (0.5, "Before the grade")
    comment.fill("")
    comment.press_sequentially("u15 djk")  # The page's shortcuts must not act here.
    assert recorder.grade("a") == (0.5, "Before the grade")
    comment.press("Control+Enter")  # leaves the field, so that the next key grades
    expect(page.locator("#conversation")).to_be_focused()
    expect(page.locator("#saved")).to_have_text("Reward +0.5 saved")
    assert recorder.grade("a") == (0.5, "u15 djk")
    comment.press("End")
    comment.press_sequentially("!")
    comment.press("Escape")  # leaves the field
    expect(page.locator("#conversation")).to_be_focused()
    expect(page.locator("#saved")).to_have_text("Reward +0.5 saved")
    assert recorder.grade("a") == (0.5, "u15 djk!")
    page.keyboard.press("2")  # a new grade keeps the comment
    expect(page.locator("#saved")).to_have_text("Reward −0.5 saved")
    assert recorder.grade("a") == (-0.5, "u15 djk!")
    comment.fill("Left by a click on another rollout")
    rows(page).first.click()
    expect(page.locator("#name")).to_have_text("b")
    expect(comment).to_have_value("")
    rows(page).nth(1).click()
    expect(comment).to_have_value("Left by a click on another rollout")
    assert recorder.grade("a") == (-0.5, "Left by a click on another rollout")
    assert recorder.grade("b") == (None, None)


def test_next_and_previous(page, recorder):
    for name in "abc":
        recorder.add(name, f"Question {name}")
    page.goto(recorder.url)
    expect(rows(page)).to_have_count(3)
    for key, name in (("j", "c"), ("j", "b"), ("ArrowDown", "a"), ("j", "a"), ("k", "b"), ("ArrowUp", "c"), ("k", "c")):
        page.keyboard.press(key)
        expect(page.locator("#name")).to_have_text(name)
        expect(page.locator("#conversation")).to_contain_text(f"Question {name}")
        expect(page.locator("#rows a[aria-current]")).to_contain_text(f"Question {name}")
    page.keyboard.press("Escape")
    expect(page.locator("#grade")).to_be_hidden()
    assert page.evaluate("location.hash") == ""


def test_grading_all_that_is_not_graded(page, recorder):
    for name in "abcd":
        recorder.add(name, f"Question {name}")
    recorder.store.set_reward("b", "rating", 1)
    page.goto(recorder.url)
    page.get_by_role("button", name="Not graded").click()
    expect(rows(page)).to_have_count(3)
    page.route("**/rollouts?*", lambda route: None)  # The list does not wait for the server, which can search for long.
    page.keyboard.press("j")
    for name, following in ("dc", "ca"):
        expect(page.locator("#conversation")).to_contain_text(f"Question {name}")
        page.keyboard.press("2")
        expect(page.locator("#saved")).to_have_text("Saved −0.5. Next rollout: Not graded")
        expect(page.locator("#name")).to_have_text(following)
        expect(page.locator("#rows")).not_to_contain_text(f"Question {name}", timeout=1_000)  # before a poll
        assert recorder.grade(name) == (-0.5, None)
    expect(rows(page)).to_have_count(1)
    page.keyboard.press("1")
    expect(page.locator("#saved")).to_have_text("Reward −1 saved")  # There is no other answer to grade.
    expect(page.locator("#name")).to_have_text("a")


def conversation(recorder, name, *answers):
    turns = []
    for answer in answers:
        turns, message = recorder.add(name, *turns, f"About {answer}?", answer=answer)
        turns = [*turns, message]


def test_each_answer_of_a_conversation_is_graded(page, recorder):
    recorder.add("next", "Hi")
    conversation(recorder, "talk", "One", "Two", "Three")
    recorder.store.set_reward("talk", "test", 0.5, None, 3)
    page.goto(recorder.url)
    rows(page).first.click()
    turns, saved = page.locator("#conversation .turn.own"), page.locator("#saved")
    expect(saved).to_have_text("Answer 1 · Not graded")
    expect(turns.nth(2)).to_contain_text("test +0.5")
    page.get_by_text("Two", exact=True).click()
    expect(saved).to_have_text("Answer 2 · Not graded")
    expect(page.locator(".turn.picked")).to_contain_text("Two")
    page.keyboard.press("5")
    expect(saved).to_have_text("Saved +1 for answer 2. Now: Answer 3 · Not graded")
    expect(turns.nth(1)).to_contain_text("rating +1")
    expect(rows(page).first).to_contain_text("rating +1 (1 of 3)")
    page.keyboard.press("c")
    page.keyboard.type("Why")
    page.keyboard.press("p")  # is text
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    expect(saved).to_have_text("Saved −1 for answer 3. Now: Answer 1 · Not graded")  # an earlier answer is left
    expect(rows(page).first).to_contain_text("mean rating 0 (2 of 3)")
    expect(page.get_by_label("Comment")).to_have_value("")
    assert [recorder.grade("talk", answer) for answer in (1, 2, 3)] == [(None, None), (1, None), (-1, "Whyp")]
    page.keyboard.press("n")
    page.keyboard.press("n")
    expect(saved).to_have_text("Answer 3 · Reward −1 saved")
    expect(page.get_by_label("Comment")).to_have_value("Whyp")
    page.get_by_role("button", name="Remove").click()
    expect(saved).to_have_text("Answer 3 · Not graded")
    expect(page.get_by_role("button", name="Remove")).to_be_disabled()
    assert (recorder.grade("talk", 3), pressed(page)) == ((None, None), [])
    page.keyboard.press("4")
    expect(saved).to_have_text("Saved +0.5 for answer 3. Now: Answer 1 · Not graded")
    page.keyboard.press("3")
    expect(page.locator("#name")).to_have_text("next")
    expect(saved).to_have_text("Saved 0 for answer 1. Next rollout: Not graded")
    colors = {name: rows(page).locator(f".{name}").first.evaluate("each => getComputedStyle(each).color")
              for name in ("plus", "quiet")}  # fmt: skip
    assert colors["plus"] != colors["quiet"]


def test_a_rollout_has_one_grade_or_grades_of_answers(page, recorder):
    page.expected.append("409")
    for name in "abc":
        conversation(recorder, name, "One", "Two")
    open_rollout(page, recorder, "c")
    saved, whole = page.locator("#saved"), page.get_by_role("button", name="Whole rollout")
    page.keyboard.press("w")
    expect(saved).to_have_text("Whole rollout · Not graded")
    page.keyboard.press("u")
    expect(page.locator("#name")).to_have_text("b")  # The whole rollout is graded, so all its answers are.
    assert recorder.grade("c", 0) == (1, None)
    # The person grades whole rollouts.
    expect(saved).to_have_text("Saved +1 for the whole rollout. Next rollout: Whole rollout · Not graded")
    whole.click()
    expect(saved).to_have_text("Answer 1 · Not graded")
    page.keyboard.press("d")
    expect(saved).to_have_text("Saved −1 for answer 1. Now: Answer 2 · Not graded")
    whole.click()
    expect(saved).to_contain_text("Remove these to grade the whole rollout.")
    page.keyboard.press("k")
    expect(saved).to_have_text("Whole rollout · Reward +1 saved")
    page.locator(".turn.own").first.click()
    expect(saved).to_contain_text("Remove it to grade its answers.")
    assert recorder.grade("c", 1) == (None, None)
    page.keyboard.press("0")
    expect(saved).to_have_text("Whole rollout · Not graded")
    page.locator(".turn.own").nth(1).click()
    recorder.store.set_reward("c", "rating", 0)  # meanwhile
    page.keyboard.press("u")
    expect(page.get_by_role("alert")).to_contain_text("The whole rollout has a reward named rating. To grade answers")
    assert recorder.grade("c", 2) == (None, None)


def test_search(page, recorder):
    recorder.add("a", "Where is my Parcel?", answer="On its way.")
    called = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "(parcel]"}'}}]
    recorder.add("b", "Hi", answer={"role": "assistant", "content": None, "tool_calls": called})
    recorder.add("c", "Hello")
    page.goto(recorder.url)
    expect(rows(page)).to_have_count(3)
    search = page.get_by_label("Search text")
    page.keyboard.press("/")
    page.keyboard.type("parcel")
    expect(rows(page)).to_have_count(2)
    rows(page).nth(1).click()
    expect(page.locator("#conversation mark")).to_have_text("Parcel")
    search.fill("(parcel]")
    expect(rows(page)).to_have_count(2)  # The opened rollout stays until the person moves on.
    search.press("Enter")
    page.keyboard.press("k")
    expect(page.locator("#name")).to_have_text("b")
    expect(rows(page)).to_have_count(1)
    expect(page.locator("#conversation mark").filter(visible=True).last).to_have_text("(parcel]")
    search.fill("nowhere")
    expect(rows(page)).to_have_count(1)
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#empty")).to_contain_text("Search for a different text")


CODE = f"""Look:\u202e
```python
if a < b and "&amp;":
    {ATTACK}
```
Then ``` is text, and
 ~~~~ {ATTACK}
```
inside
~~~
~~~~
```js
cut"""


def test_fenced_code_is_shown_as_code(page, recorder):
    recorder.add("a", "Hi", answer=CODE)
    open_rollout(page, recorder, "a")
    answer = page.locator("#conversation .own")
    code = answer.locator("pre code")
    assert [each.text_content() for each in code.all()] == [
        f'if a < b and "&amp;":\n    {ATTACK}', "```\ninside\n~~~", "cut",
    ]  # fmt: skip
    expect(answer.locator(".code .role")).to_have_text(["python", ATTACK, "js"])
    expect(answer.locator("> .text")).to_have_text(["Look:[U+202E]", "Then ``` is text, and"])


def test_new_rollouts_appear_without_losing_the_place(page, recorder):
    for n in range(40):
        recorder.add(f"old-{n}", f"Old {n}.")
    trajectory(recorder)
    open_rollout(page, recorder, "task")
    page.locator("summary", has_text="System prompt").click()
    expect(page.locator("#unrecorded")).to_be_hidden()
    page.request.post(f"{recorder.url}v1/embeddings", data={})  # The server cannot be reached.
    # A further call of the opened rollout appears, and unfolded parts stay unfolded.
    recorder.add("task", "Last question", answer="Last answer")
    expect(page.locator("#conversation")).to_contain_text("Last answer", timeout=TIMEOUT)
    expect(page.locator("#unrecorded")).to_contain_text("POST /v1/embeddings: 1", timeout=TIMEOUT)
    expect(page.locator("details[open]")).to_have_count(1)
    page.locator("#list").evaluate("list => { list.scrollTop = 700; }")
    place = rows(page).filter(has_text="Old 30.").bounding_box()["y"]
    for n in range(60):  # more than the server returns at once
        recorder.add(f"new-{n}", f"New {n}.")
    expect(rows(page)).to_have_count(101, timeout=TIMEOUT)
    assert rows(page).filter(has_text="Old 30.").bounding_box()["y"] == pytest.approx(place, abs=2)
    expect(page.locator("#name")).to_have_text("task")
    expect(page.locator("details[open]")).to_have_count(1)


def test_load_more(page, recorder):
    for n in range(120):
        recorder.add(f"r{n}", f"Question {n}.")
    recorder.store.set_reward("r0", "rating", 1)
    page.goto(recorder.url)
    expect(rows(page)).to_have_count(50)
    more = page.get_by_role("button", name="Load more")
    page.get_by_role("button", name="Graded", exact=True).click()
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("Question 0.")
    expect(more).to_be_hidden()
    page.get_by_role("button", name="All").click()
    expect(rows(page)).to_have_count(50)
    more.click()
    expect(rows(page)).to_have_count(100)
    page.keyboard.press("j")
    expect(page.locator("#name")).to_have_text("r119")
    rows(page).nth(99).click()
    expect(page.locator("#name")).to_have_text("r20")
    page.keyboard.press("j")  # loads the last rows
    expect(page.locator("#name")).to_have_text("r19")
    expect(rows(page)).to_have_count(120)
    expect(more).to_be_hidden()
    texts = [row.inner_text() for row in rows(page).all()]
    assert all(f"Question {119 - n}." in text for n, text in enumerate(texts))


def test_narrow_screen(browser, recorder):
    recorder.add("x" * 100, "word" * 200, answer="long" * 500)
    recorder.add("failed", "Hi", answer=None, state=State.FAILED, error="http://" + "x" * 300)
    trajectory(recorder)
    recorder.store.set_reward("task", "a" * 60, 1, "c" * 300)
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(recorder.url)
    width = "document.documentElement.scrollWidth"
    for n in range(3):
        row = rows(page).nth(n)
        row.click()
        expect(page.locator("#grade")).to_be_visible()
        expect(row).to_be_hidden()
        for fold in page.locator("summary").all():
            fold.click()
        assert page.evaluate(width) <= 390
        assert page.locator("#conversation").evaluate("each => each.scrollWidth <= each.clientWidth")
        buttons = [each.bounding_box() for each in page.locator("button").all() if each.is_visible()]
        assert all(box["height"] >= 40 and box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in buttons)
        page.get_by_role("button", name="Back").click()
        expect(row).to_be_visible()
        expect(page.locator("#detail")).to_be_hidden()
        assert page.evaluate(width) <= 390
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    context.close()


def test_error_of_the_server(page, recorder, monkeypatch):
    page.expected.append("507")
    recorder.add("a", "Hi")
    recorder.store.set_reward("a", "rating", 0)
    open_rollout(page, recorder, "a")
    alert = page.get_by_role("alert")
    expect(alert).to_be_hidden()

    def full(*_):
        raise StorageFullError("The disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(recorder.served, "set_reward", full)
        page.keyboard.press("5")
        expect(alert).to_contain_text("was not saved. The disk is full")
        expect(page.locator("#saved")).to_have_text("Not saved")
        assert pressed(page) == ["Score 3 of 5"], "the earlier grade"
        page.get_by_label("Comment").fill("Kept")
        page.get_by_label("Comment").press("Escape")
        expect(page.locator("#saved")).to_have_text("Not saved")
    page.keyboard.press("5")
    expect(alert).to_be_hidden()
    assert recorder.grade("a", 0) == (1, "Kept")


def test_recorder_is_stopped(page, recorder):
    page.expected.append("ERR_CONNECTION_REFUSED")
    recorder.add("a", "Hi")
    open_rollout(page, recorder, "a")
    recorder.stop()
    page.keyboard.press("5")
    expect(page.get_by_role("alert")).to_contain_text("The recorder does not answer.")
    assert pressed(page) == []
    assert recorder.grade("a") == (None, None)


def test_links_to_rollouts(page, recorder):
    page.expected.append("404")
    name = "a/b?c=%20&{d}#é<e>"
    recorder.add(name, "Hi")
    page.goto(f"{recorder.url}#none")
    expect(page.get_by_role("alert")).to_contain_text("There is no rollout 'none'.")
    rows(page).click()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#name")).to_have_text(name)
    expect(page.locator("#grade")).to_be_visible()  # Keys grade once the conversation is loaded.
    page.keyboard.press("5")
    expect(page.locator("#saved")).to_have_text("Reward +1 saved")
    assert recorder.grade(name) == (1, None)
    page.reload()
    expect(page.locator("#saved")).to_have_text("Reward +1 saved")
