"""`kway tree build --ray` computes the same vectors on a Ray cluster as on this machine."""

import hashlib
import subprocess
import sys
from itertools import product

import pytest

from heads.tree.encoder import encode_names
from tests.data.ray_cluster import ray_cluster
from tests.system.processes import ROOT, environment
from tests.tiny_bundle import tiny_text_backbone, tiny_tokenizer

_PRINT_VECTORS = """
import hashlib
import heads.tree
from launch.main import main

encode = heads.tree.encode_names

def printed(*arguments, **options):
    vectors = encode(*arguments, **options)
    print("vectors", hashlib.sha256(vectors.tobytes()).hexdigest())
    return vectors

heads.tree.encode_names = printed
main()
"""


@pytest.mark.slow
def test_the_vectors_of_class_names_are_identical_for_any_number_of_workers(tmp_path):
    encoder, names = tmp_path / "encoder", tmp_path / "names.txt"
    tiny_text_backbone().encoder.save_pretrained(encoder)
    tiny_tokenizer().save(encoder)
    words = product(("a", "cat", "and", "dog", "hund"), repeat=4)
    names.write_text("".join(f"{' '.join(some)} {i}\n" for i, some in enumerate(words)))
    expected = encode_names(encoder, names.read_text().splitlines())
    (tmp_path / "cluster").mkdir()
    with ray_cluster(tmp_path / "cluster") as cluster:
        for workers in (1, 3):
            cluster.resize(workers)
            build = ("tree", "build", encoder, "--classes", names, "--ray", cluster.address, "-o")
            ran = subprocess.run(
                [sys.executable, "-P", "-c", _PRINT_VECTORS, *map(str, build), tmp_path / "tree"],
                capture_output=True,
                cwd=ROOT,
                env={**environment(), **cluster.environment},
                text=True,
                timeout=240,
            )
            assert ran.returncode == 0, ran.stderr
            digest = hashlib.sha256(expected.tobytes()).hexdigest()
            assert f"vectors {digest}" in ran.stdout.splitlines()
            (tmp_path / "tree").unlink()
