"""The namespace lab: several hosts on one machine, for tests of what happens between hosts.

Every host is a network namespace with its own host name and HOME. All of them, and a controller, hang on one
management network; hosts are cabled to each other as a full mesh, a ring or a chain. Needs root and the `ip`
command.

    with Lab(hosts=4, topology="ring") as lab:
        lab.hosts[0].run(["flare", "agent", "--listen", f"{lab.hosts[0].address}:29900"])

On the command line: `python -m netlab --hosts 4 --ring -- COMMAND`.
"""

from netlab.host import Counters, Host, Interface
from netlab.iproute import LabError
from netlab.lab import Cable, Lab, Topology

__all__ = ["Cable", "Counters", "Host", "Interface", "Lab", "LabError", "Topology"]
