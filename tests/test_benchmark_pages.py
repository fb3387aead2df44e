"""The pages of benchmarks hold what the stored figures say."""

import pytest
from pages import PAGES, rendered


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_from_the_stored_figures(name):
    file, text = next((file, text) for file, text in rendered().items() if file.stem == name)
    assert file.read_text() == text, "run python benchmarks/pages.py"
