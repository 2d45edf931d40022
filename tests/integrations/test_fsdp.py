"""FSDP2 on two processes."""

from launch import torchrun


def test_sharded_training_is_that_of_ddp_and_of_one_process_and_resumes_bitwise(tmp_path):
    assert torchrun("sharded.py", tmp_path) == "all is well\n"
