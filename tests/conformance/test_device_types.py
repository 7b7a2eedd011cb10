"""PyTorch's framework that makes a test for each device makes them for this one."""

import unittest

import pytest
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA, onlyPRIVATEUSE1
from torch.testing._internal.common_utils import TestCase


@pytest.mark.parametrize("bypass,expected", [(False, ["own"]), (True, ["cuda", "own"])])
def test_tests_are_made_and_those_of_cuda_can_be_had(bypass, expected):
    ran = []

    class Sample(TestCase):
        bypass_device_restrictions = bypass

        @onlyPRIVATEUSE1
        def test_own(self, device):
            ran.append(("own", device))

        @onlyCUDA
        def test_cuda(self, device):
            ran.append(("cuda", device))

    scope = {"Sample": Sample}
    instantiate_device_type_tests(Sample, scope, only_for="neuron")
    (made,) = scope.values()
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(made).run(result)
    assert not result.errors and not result.failures
    assert ran == [(name, "neuron:0") for name in expected]
