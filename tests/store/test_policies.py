"""Which policy `auto` takes: never a slower way than another would be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefloe.store.policies import POLICIES, PolicyName, choose

GIGABIT = 1e9


@pytest.mark.parametrize(
    ("link", "cores", "policy"),
    [
        (GIGABIT, 2, "balanced"),
        (GIGABIT, 16, "balanced"),
        (10 * GIGABIT, 2, "fast"),
        (10 * GIGABIT, 16, "balanced"),
        (100 * GIGABIT, 2, "fast"),
        (100 * GIGABIT, 16, "fast"),
    ],
)
def test_usual_links(link: float, cores: int, policy: PolicyName) -> None:
    assert choose(link, cores) == policy


@given(st.floats(1e6, 1e12), st.integers(1, 128))
def test_no_other_is_much_sooner(link: float, cores: int) -> None:
    def took(name: PolicyName) -> float:
        policy = POLICIES[name]
        return max(1 / (policy.speed * cores), policy.left * 8 / link)

    chosen = choose(link, cores)
    assert took(chosen) <= 1.02 * min(map(took, POLICIES)) * (1 + 1e-9)
