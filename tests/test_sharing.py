"""Equal texts are one object, and the data stays what it was."""

import json

from autotune.sharing import SharedTexts


def test_equal_texts_of_later_data_are_those_of_earlier_data() -> None:
    text = json.dumps({"host": "a machine", "versions": {"python": "3.11.7"}, "steps": [1, 2.5, None, "a machine"], "none": ""})
    shared = SharedTexts()
    first, second = shared.of(json.loads(text)), shared.of(json.loads(text))
    assert first == second == json.loads(text)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert second["host"] is second["steps"][3] is first["host"]
    assert second["versions"]["python"] is first["versions"]["python"]
    assert shared.of(("a", ("b",))) == ("a", ("b",))


def test_texts_that_never_repeat_do_not_pile_up() -> None:
    shared = SharedTexts()
    for number in range(20_000):
        shared.of({"key": f"text {number}"})
    assert len(shared._texts) <= 10_000
    assert shared.of("text 19999") == "text 19999"
