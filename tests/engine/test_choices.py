"""What a wrong choice is told."""

from __future__ import annotations

import pytest

from cached_rag import ConfigError, GenerationConfig
from cached_rag.spi import METHODS


def test_a_misspelt_method_is_told_all_methods_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        GenerationConfig(method="cacheblnd")
    assert set(METHODS) <= set(str(caught.value).replace(",", " ").replace(";", " ").split())
    assert str(caught.value).endswith("did you mean 'cacheblend'?")
    with pytest.raises(ConfigError, match="did you mean 'prefix'"):
        GenerationConfig(method="prefixes")
    with pytest.raises(ConfigError) as caught:
        GenerationConfig(method="xyz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("method", ["auto+epic", "full:layers=2"])
def test_a_method_that_stands_alone_says_so(method):
    with pytest.raises(ConfigError, match=r"stands alone|no option"):
        GenerationConfig(method=method)


@pytest.mark.parametrize(
    ("word", "method"), [("exact", "prefix"), ("auto", "auto"), ("fast", "fast")]
)
def test_a_quality_is_a_method_in_a_word(word, method):
    config = GenerationConfig(quality=word)
    assert config == GenerationConfig(method=method)
    assert config.replace(max_tokens=3).method == method
    assert GenerationConfig(method="epic").replace(quality=word).method == method
    ratio = GenerationConfig(recompute_ratio=0.5).replace(quality=word).recompute_ratio
    assert ratio == (0.5 if word == "auto" else None)  # another method has its own
    assert config.replace(method="full").method == "full"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quality": "best"}, "exact, auto, fast, not 'best'"),
        ({"quality": "fast", "method": "epic"}, "give one"),
        ({"quality": 1}, "quality"),
    ],
)
def test_a_quality_that_cannot_be_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        GenerationConfig(**given)
