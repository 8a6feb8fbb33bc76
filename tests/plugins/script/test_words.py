"""Secrets, hosts and files in the words of a command."""

import shlex
import socket
from pathlib import Path

import pytest

from dcpbench.plugins.script.words import hidden, leads_to, other_hosts, secrets_of


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        ("train.py --hub_token hf_abc --lr 1", "train.py --hub_token *** --lr 1"),
        ("train.py --api-key=abc", "train.py --api-key=***"),
        ("env WANDB_API_KEY=abc HF_TOKEN=x python t.py", "env WANDB_API_KEY=*** HF_TOKEN=*** python t.py"),
        ("train.py +trainer.token=abc ++db.password='a b'", "train.py +trainer.token=*** ++db.password=***"),
        ("env AWS_ACCESS_KEY_ID=abc AWS_SECRET=def x", "env AWS_ACCESS_KEY_ID=*** AWS_SECRET=*** x"),
        (
            """bash -c 'cd x; HF_TOKEN=y python t.py --secret "y z" -v'""",
            "HF_TOKEN=*** python t.py --secret *** -v",
        ),
        ("bash -c 'HF_TOKEN=y python t.py'", "bash -c 'HF_TOKEN=***'"),
        ("""train.py --config '{"token": "abc", "lr": 1}'""", '{"token": ***, "lr": 1}'),
        ("train.py --push_token --lr 1", "train.py --push_token --lr 1"),
        ("train.py --tokenizer_name x --max_tokens 5 keys=1", "--tokenizer_name x --max_tokens 5 keys=1"),
    ],
)
def test_secrets_are_masked(typed: str, printed: str) -> None:
    words = shlex.split(typed)
    masked = hidden(shlex.join(words), secrets_of(words))
    assert printed in masked.replace("'++db.password=***'", "++db.password=***")


def test_secrets_are_masked_in_texts_that_quote_the_command() -> None:
    secrets = secrets_of(["train.py", "--hub_token", "hf_abcdefgh", "--password=pw with spaces"])
    text = "Command '['t.py', '--hub_token', 'hf_abcdefgh']' failed at hf_abcdefgh; pw with spaces; a token"
    assert hidden(text, secrets) == "Command '['t.py', '--hub_token', ***]' failed at ***; ***; a token"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("torchrun --nnodes=2 t.py", "nnodes=2"),
        ("torchrun --nnodes 1:4 t.py", "nnodes 1:4"),
        ("accelerate launch --num_machines 2 t.py", "num_machines 2"),
        ("env SLURM_NNODES=2 t.py", "SLURM_NNODES=2"),
        ("torchrun --rdzv-endpoint=other.example:29400 t.py", "rdzv-endpoint=other.example"),
        ("env MASTER_ADDR=192.0.2.1 t.py", "MASTER_ADDR=192.0.2.1"),
        ("srun -n 4 --nodes=2 python t.py", "srun -n 4 --nodes=2"),
        ("srun -N2 python t.py", "srun -N2"),
        ("python t.py --nodes 2", ""),
        ("mpirun --hostfile hosts t.py", "hosts: b slots=8"),
        ("accelerate launch --config_file a.yaml t.py", "a.yaml: num_machines: 2"),
        ("torchrun --nnodes=1 --rdzv_endpoint localhost:0 --rdzv-backend c10d t.py", ""),
        ("torchrun --nnodes 1:1 --master-addr 127.0.0.1 t.py --config_file b.yaml", ""),
        (f"env SLURM_NNODES=1 MASTER_ADDR={socket.gethostname()} t.py --rdzv_endpoint=[::1]:29400", ""),
    ],
)
def test_other_hosts(tmp_path: Path, words: str, named: str) -> None:
    (tmp_path / "hosts").write_text("# two\na slots=8\nb slots=8\n")
    (tmp_path / "a.yaml").write_text("mixed_precision: no\nnum_machines: 2\n")
    (tmp_path / "b.yaml").write_text("mixed_precision: no\nnum_machines: 1\n")
    assert other_hosts(shlex.split(words), {}, tmp_path) == named


def test_other_hosts_by_the_environment(tmp_path: Path) -> None:
    assert other_hosts(["t.py"], {"SLURM_JOB_NUM_NODES": "2"}, tmp_path) == "SLURM_JOB_NUM_NODES=2"
    assert other_hosts(["t.py"], {"PET_NNODES": "2", "A": "1"}, tmp_path) == "PET_NNODES=2"
    assert other_hosts(["t.py"], {"SLURM_NNODES": "1", "NODES": "2"}, tmp_path) == ""
    address = {"MASTER_ADDR": "192.0.2.1"}
    assert other_hosts(["t.py"], address, tmp_path) == ""
    assert other_hosts(["t.py"], address | {"WORLD_SIZE": "4"}, tmp_path) == "MASTER_ADDR=192.0.2.1"


def test_word_that_leads_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    words = [
        "python",
        "train.py",
        "x" * 5000,
        "y/" * 5000,
        "a\0b",
        "--root=.",
        "--to",
        "runs",
        f"--x={tmp_path}/else",
    ]
    assert leads_to(f"{tmp_path}/runs/last.pt", words, tmp_path) == "runs"
    assert leads_to(f"{tmp_path}/else", words, tmp_path) == f"--x={tmp_path}/else"
    assert leads_to(f"{tmp_path}/runs2/last.pt", words, tmp_path) == "--root=."
    assert leads_to("/nowhere", words, tmp_path) == ""
