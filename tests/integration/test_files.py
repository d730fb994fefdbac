"""Files that TensorFlow has written, and what it reads in them."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import replicax


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_tfrecords(tmp_path, compression) -> None:
    rng = np.random.default_rng(0)
    records = [rng.bytes(size) for size in [0, 1, 511, 512, 513, 100_000, *rng.integers(0, 2000, 50)]]
    file = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(file, compression) as writer:
        for record in records:
            writer.write(record)
    assert list(replicax.data.tfrecords(file)) == records
    assert list(tf.data.TFRecordDataset(file, compression).as_numpy_iterator()) == records


@pytest.mark.parametrize("data", [b"", b"a", b"a\n\nb\n", b"a\r\nb\r\n", "ü\u2028\x85\n日本".encode(), b"\n\n"])
def test_lines(tmp_path: pathlib.Path, data) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(data)
    theirs = [line.decode() for line in tf.data.TextLineDataset(str(file)).as_numpy_iterator()]
    assert list(replicax.data.text_lines(file)) == theirs


def test_csv(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('i,x,s\n1,2.5,"a, ""b"""\n-3,1e3,\n')
    theirs = tf.data.experimental.CsvDataset(str(file), [tf.int64, tf.float64, tf.constant([""])], header=True)
    ours = [tuple(row.values()) for row in replicax.data.csv_rows(file)]
    assert ours == [(i, x, s.decode()) for i, x, s in theirs.as_numpy_iterator()]
