"""Patterns of shards mean what they mean to the braceexpand package, which webdataset asks."""

from __future__ import annotations

import itertools
import re

import pytest
from braceexpand import braceexpand
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.pipeline.sources.shard_names import MOST_SHARDS, expanded, joined

ENDS = st.integers(-120, 120).flatmap(lambda n: st.sampled_from([str(n), f"{n:03d}", f"{n:05d}"]))
RANGES = st.one_of(
    st.tuples(ENDS, ENDS), st.tuples(ENDS, ENDS, ENDS), st.tuples(st.sampled_from("azAZmM"), st.sampled_from("azAZmM"))
).map("..".join)
TEXTS = st.text("ab0-./_*?:, ", max_size=4) | st.sampled_from(["s3://bucket/", r"\{", r"\}", r"\,", "..", "{}"])
PATTERNS = st.recursive(
    TEXTS | RANGES.map("{{{}}}".format),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")
    ),
    max_leaves=8,
)


@given(pattern=PATTERNS)
@settings(max_examples=300, deadline=None)
def test_braces_expand_as_webdataset_expands_them(pattern: str) -> None:
    names = list(itertools.islice(braceexpand(pattern), 2000))
    if len(names) < 2000:
        assert expanded(pattern) == names


@pytest.mark.parametrize("pattern", ["{0..9999999999}", "{1..99999}" * 3, "{{0..999999}{0..999999},x}", "{,}" * 40])
def test_far_too_many_names_are_refused_at_once(pattern: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{pattern!r} names more than {MOST_SHARDS:,} shards")):
        expanded(pattern)


@pytest.mark.parametrize("pattern", ["{", "}", "a{0..1", "a}b{c", "{a,{b}", r"{a\}"])
def test_braces_without_a_partner_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"the braces of {pattern!r} do not match")):
        expanded(pattern)


def test_a_double_colon_joins_patterns_but_for_chained_file_systems() -> None:
    assert joined("a.tar::{b,c}.tar::s3://d.tar") == ["a.tar", "{b,c}.tar", "s3://d.tar"]
    for chain in ("simplecache::s3://bucket/a.tar", "zip://a.tar::s3://bucket/b.zip", "filecache::gs://{a,b}.tar"):
        assert joined(chain) == [chain]
