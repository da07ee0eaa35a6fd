"""A target with something to learn from, and a drafter that is not trained."""

import pytest

from tests.tlt_core.drafter.eagle3.reference import lively_model
from tests.tlt_core.drafter.eagle3.training_texts import IDS, lively_decoder


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return lively_decoder(tiny_config)


@pytest.fixture
def model(tiny_config):
    return lively_model(tiny_config, IDS)
