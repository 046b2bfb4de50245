"""docs/messages.md holds every message that can reach a user."""

from tools.messages import PAGE, ROOT, messages, page

SOURCE = """
def f(path, number):
    if number:
        raise ConfigError("model", f"{path} holds no config.json; " "give a folder")
    log.warning("journal: invalid request ignored", path=path)
    log.info("worker joined again")
    yield FieldViolation("grammar", "must not be empty")
    requests.end(request, message=f"the prompt has {number} tokens")
    raise KeyError(path)
"""


def test_messages_of_errors_fields_ends_and_warnings_are_found() -> None:
    """Errors, refused fields, ends of requests and warnings count; logs at info and errors without a text do not."""
    assert {each.text for each in messages("m.py", SOURCE)} == {
        "model: {path} holds no config.json; give a folder",
        "journal: invalid request ignored",
        "grammar: must not be empty",
        "the prompt has {number} tokens",
    }


def test_the_page_is_up_to_date() -> None:
    """A message that changes appears on the page: run `python -m tools.messages`."""
    assert PAGE.read_text("utf-8") == page(ROOT)
