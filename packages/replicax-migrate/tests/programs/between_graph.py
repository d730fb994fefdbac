"""Parameter servers of 1.x: a server in each process, and one graph for each worker."""

import sys

import tensorflow.compat.v1 as tf

job, index = sys.argv[1], int(sys.argv[2])
cluster = tf.train.ClusterSpec({"ps": ["localhost:4000"], "worker": ["localhost:4001", "localhost:4002"]})
server = tf.train.Server(cluster, job_name=job, task_index=index)
if job == "ps":
    server.join()

with tf.device(tf.train.replica_device_setter(cluster=cluster)):
    weight = tf.Variable(0.0)
    optimizer = tf.train.SyncReplicasOptimizer(tf.train.AdagradOptimizer(0.1), replicas_to_aggregate=2)
    update = optimizer.minimize((weight - 1.0) ** 2, global_step=tf.train.get_or_create_global_step())

with tf.train.MonitoredTrainingSession(master=server.target, is_chief=index == 0) as session:
    for _ in range(10):
        session.run(update)
