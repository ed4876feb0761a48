"""Files of the user's own: what their interpolations may stand for.

What else they may not say is in execution/test_untrusted_files.py.
"""

import pytest

from autotune.config.user_files import leaves_folder


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/etc/x", "..\\x", "file://x"])
def test_names_that_lead_out_of_a_folder_are_known(name: str) -> None:
    assert leaves_folder(name)


@pytest.mark.parametrize("name", ["mlp", "my.net", "a/b", "a..b", "..."])
def test_other_names_do_not_lead_out(name: str) -> None:
    assert not leaves_folder(name)
