"""The running system: the only place with streams and threads.

Who owns which tensor:

- A **weight** is the user's. The runtime writes it in ``step()`` and ``synchronize()`` only.
- A **gradient** becomes the runtime's in ``step()``; afterwards ``.grad`` is None.
- **Selected state** (master and moments of selected channels) lives on the device, in a segment.
- **Host state** (master and moments of deferred channels) rests in the storage; a sweep's worker
  holds it while it runs, the training thread between a publish and the next sweep.
- A **slot**'s gradient is written by the link and read by one sweep, then its buffer returns to the
  pool.
- **Staging** (a segment's new weights) is written by a worker, crosses the link, and is read by a
  publish.
"""
