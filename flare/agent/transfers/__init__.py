"""Core bytes between nodes.

| module | what |
|---|---|
| serving | FETCH and FETCH_FABRIC: a node sends what it holds, or passes on what the next hop sends |
| holding | which file of this node a grant's member may be sent |
| requests | TRANSFER: the checks, the controller's waiting, progress |
| running | two transfers of one core at once become one |
| plan | what a TRANSFER asks for, held against the signed index. Pure |
| route | which way to the source: over the fabric's rails, or its paired address; streams |
| stock | what this node has of a core already |
| shelf | what a transfer puts into the core directory, marks, and takes back |
| intake | one transfer from beginning to end |
| receiving | the bytes of one file over all streams, and their journal |
| partial | a file that is being received; with a journal it outlives a failure |
| journal | which blocks of a partial file are on the disk |
"""

from __future__ import annotations
