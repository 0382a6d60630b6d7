"""Random walks through all that is done to a cache."""

import pytest

pytest.register_assert_rewrite(*(f"tests.walks.{name}" for name in ("acting", "joining", "life", "walk")))
