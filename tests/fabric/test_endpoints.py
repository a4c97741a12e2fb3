"""Endpoints as sysfs trees of several machines describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from flare.errors import ConfigError
from flare.fabric.endpoints import Addresses, Endpoint, PcieLink, host_addresses, read_endpoints
from flare.fabric.lldp import Neighbours
from flare.fabric.values import Neighbour
from tests.fabric.sysfs import FakeSysfs, build_spark

SPARK_ADDRESSES: Addresses = {
    "enp1s0f0np0": (("10.200.0.12", 24),),
    "enP2p1s0f0np0": (("10.200.1.12", 24),),
    "enp1s0f1np1": (("10.200.2.12", 24),),
    "enP2p1s0f1np1": (("10.200.3.12", 24),),
    "enP7s7": (("192.168.7.12", 24),),
    "wlP9s9": (("192.168.9.12", 24),),
    "lo": (("127.0.0.1", 8),),
}


def nobody(_: Mapping[str, int]) -> Neighbours:
    return {}


def read(sysfs: FakeSysfs, addresses: Addresses, interfaces: tuple[str, ...] = ()) -> tuple[Endpoint, ...]:
    return read_endpoints(sysfs.root, interfaces, addresses=lambda: addresses, neighbours=nobody)


def test_both_halves_of_both_ports_of_a_spark(tmp_path: Path) -> None:
    found = read(build_spark(tmp_path), SPARK_ADDRESSES)
    assert [one.interface for one in found] == [
        "enp1s0f0np0",
        "enP2p1s0f0np0",
        "enp1s0f1np1",
        "enP2p1s0f1np1",
    ]
    assert found[1] == Endpoint(
        device="roceP2p1s0f0",
        port=1,
        interface="enP2p1s0f0np0",
        address="10.200.1.12",
        prefix=24,
        mac="4c:bb:47:00:02:00",
        pci="0002:01:00.0",
        link=PcieLink(32.0, 4),
    )
    assert found[0].device == "rocep1s0f0"
    assert [one.cage for one in found] == ["01:00.0", "01:00.0", "01:00.1", "01:00.1"]
    assert [one.half for one in found] == ["0000:01:00", "0002:01:00"] * 2
    assert str(found[0].network) == "10.200.0.0/24"


def test_a_port_without_a_cable_has_no_endpoints(tmp_path: Path) -> None:
    found = read(build_spark(tmp_path, cabled=(1,)), SPARK_ADDRESSES)
    assert [one.interface for one in found] == ["enp1s0f1np1", "enP2p1s0f1np1"]


def test_an_interface_without_an_ipv4_address_is_no_endpoint_and_one_with_two_is_two(tmp_path: Path) -> None:
    addresses: Addresses = {"enp1s0f0np0": (("10.0.0.9", 24), ("10.0.0.10", 24)), "enP2p1s0f0np0": ()}
    found = read(build_spark(tmp_path), addresses)
    assert [one.address for one in found] == ["10.0.0.9", "10.0.0.10"]


def test_an_interface_that_was_set_down_is_no_endpoint(tmp_path: Path) -> None:
    sysfs = build_spark(tmp_path)
    (tmp_path / "class/net/enp1s0f0np0/operstate").write_text("down\n")
    assert next(one.interface for one in read(sysfs, SPARK_ADDRESSES)) == "enP2p1s0f0np0"


def test_infiniband_is_not_roce(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path)
    function = sysfs.pci_function("0000:41:00.0")
    sysfs.interface("ib0", function)
    sysfs.rdma_port(sysfs.rdma_device("mlx5_0", function), layer="InfiniBand", interfaces=("ib0",))
    assert read(sysfs, {"ib0": (("10.0.0.1", 24),)}) == ()


def test_a_device_of_two_ports_without_gids_finds_each_interface(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path)
    function = sysfs.pci_function("0000:41:00.0", speed="16.0 GT/s PCIe", width="8")
    sysfs.interface("eth4", function, port=0)
    sysfs.interface("eth5", function, port=1)
    device = sysfs.rdma_device("mlx4_0", function)
    sysfs.rdma_port(device, 1)
    sysfs.rdma_port(device, 2)
    found = read(sysfs, {"eth4": (("10.0.0.1", 24),), "eth5": (("10.0.1.1", 24),)})
    assert [(one.port, one.interface) for one in found] == [(1, "eth4"), (2, "eth5")]
    assert found[0].link == PcieLink(16.0, 8)
    assert found[0].link.capacity == 128.0


def test_a_function_with_one_interface_needs_no_port_number(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path)
    function = sysfs.pci_function("0000:41:00.0")
    sysfs.interface("eth4", function, port=7)
    sysfs.rdma_port(sysfs.rdma_device("mlx5_0", function))
    assert [one.interface for one in read(sysfs, {"eth4": (("10.0.0.1", 24),)})] == ["eth4"]


def test_a_vlan_on_a_roce_port_is_an_endpoint(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path)
    function = sysfs.pci_function("0000:41:00.0")
    sysfs.interface("eth4", function)
    sysfs.interface("eth4.7")
    sysfs.rdma_port(sysfs.rdma_device("mlx5_0", function), interfaces=("eth4", "eth4.7"))
    [found] = read(sysfs, {"eth4.7": (("10.7.0.1", 24),)})
    assert (found.interface, found.device, found.pci) == ("eth4.7", "mlx5_0", "0000:41:00.0")


def test_a_link_that_sysfs_does_not_know(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path)
    function = sysfs.pci_function("0000:41:00.0", speed="Unknown", width="0")
    sysfs.interface("eth4", function)
    sysfs.rdma_port(sysfs.rdma_device("mlx5_0", function), interfaces=("eth4",))
    addresses = {"eth4": (("10.0.0.1", 24),)}
    assert read(sysfs, addresses)[0].link is None
    (function / "current_link_speed").write_text("2.5 GT/s PCIe\n")
    assert read(sysfs, addresses)[0].link is None


def test_a_soft_roce_device_has_no_pci_address(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path)
    folder = sysfs.interface("eth1")
    device = tmp_path / "class/infiniband/rxe0"
    device.mkdir()
    sysfs.rdma_port(device, interfaces=("eth1",))
    [found] = read(sysfs, {"eth1": (("10.0.0.1", 24),)})
    assert (found.pci, found.half, found.cage, found.link) == ("", "", "", None)
    assert folder.is_dir()


def test_named_interfaces_stand_in_only_where_there_is_no_roce(tmp_path: Path) -> None:
    names = ("wlP9s9", "enP7s7", "enP7s7")
    assert read(build_spark(tmp_path / "cabled"), SPARK_ADDRESSES, names)[0].device == "rocep1s0f0"
    found = read(build_spark(tmp_path / "bare", cabled=()), SPARK_ADDRESSES, names)
    assert [(one.interface, one.device, one.port) for one in found] == [("wlP9s9", "", 0), ("enP7s7", "", 0)]
    assert (found[1].pci, found[1].link) == ("0007:01:00.0", PcieLink(8.0, 1))
    assert read(build_spark(tmp_path / "unnamed", cabled=()), SPARK_ADDRESSES) == ()


def test_loopback_counts_as_up_and_a_dead_interface_does_not(tmp_path: Path) -> None:
    sysfs = build_spark(tmp_path, cabled=())
    assert [one.address for one in read(sysfs, SPARK_ADDRESSES, ("enp1s0f0np0", "lo"))] == ["127.0.0.1"]


@pytest.mark.parametrize("name", ["eth9", "../net/lo", "no/such"])
def test_an_interface_that_does_not_exist_is_named(tmp_path: Path, name: str) -> None:
    sysfs = build_spark(tmp_path, cabled=())
    with pytest.raises(ConfigError, match=r"names .* which this host lacks\. Correct config.toml"):
        read(sysfs, SPARK_ADDRESSES, (name,))


def test_neighbours_are_asked_by_index_and_kept(tmp_path: Path) -> None:
    asked: list[Mapping[str, int]] = []
    spark = Neighbour("0123", "enp1s0f1np1", "", "hertz")

    def neighbours(indices: Mapping[str, int]) -> Neighbours:
        asked.append(indices)
        return {"enp1s0f0np0": (spark,), "wlP9s9": (spark,)}

    sysfs = build_spark(tmp_path, cabled=(0,))
    found = read_endpoints(sysfs.root, addresses=lambda: SPARK_ADDRESSES, neighbours=neighbours)
    assert [one.lldp for one in found] == [(spark,), ()]
    assert asked == [{"enp1s0f0np0": 2, "enP2p1s0f0np0": 4}]


def test_a_host_without_rdma_has_no_endpoints(tmp_path: Path) -> None:
    assert read_endpoints(tmp_path, addresses=dict, neighbours=nobody) == ()


def test_this_host() -> None:
    for endpoint in read_endpoints(interfaces=("lo",)):
        assert endpoint.address in {address for address, _ in host_addresses()[endpoint.interface]}


def test_host_addresses_have_prefix_lengths() -> None:
    assert ("127.0.0.1", 8) in host_addresses()["lo"]
