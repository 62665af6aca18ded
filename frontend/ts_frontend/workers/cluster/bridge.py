"""The process between the server and Ray: `python -m ts_frontend.workers.cluster.bridge --fd N --address ADDRESS`.

It alone imports Ray, whose threads, memory and faults stay out of the server. Orders come as lines of JSON on the
socket N, events go back the same way. Actors are detached: they live as long as their connection to the server, even if
this process ends.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

try:
    import ray
    import ray.cloudpickle
    import ray.exceptions
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"workers in a Ray cluster need torchrelay's extra: pip install torchrelay[ray] ({error})"
    ) from None

import ts.version
from ts_frontend.workers.cluster import packing

NAMESPACE = "torchrelay"
#: Seconds between two checks of the cluster.
LOOK_S = 1.0
THREADS = 8
VALID_DAYS = 3650
#: Seconds until an actor ends whose worker has ended.
LINGER_S = 20.0
#: The most seconds for a node's answer to the request for a spare process.
SPARE_S_MAX = 10.0
METRICS_FILE = ".torchrelay-metrics.yaml"
NODE_LABEL = "ray.io/node-id"


def made_certificates() -> dict[str, str]:
    """The certificate of this start's authority, and the certificates and keys of the server and of its workers, as
    PEM. The authority's key is discarded."""
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "torchrelay")])

    def certificate(
        subject: str,
        key: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        usage: x509.ObjectIdentifier | None,
    ) -> str:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        else:
            builder = builder.add_extension(
                x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True
            )
        signed = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return str(signed, "ascii")

    def pem(key: ec.EllipticCurvePrivateKey) -> str:
        form = serialization.PrivateFormat.PKCS8
        return str(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()), "ascii")

    authority_key, server_key, worker_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    return {
        "authority": certificate("torchrelay", authority_key, authority_key, None),
        "server": certificate("torchrelay server", server_key, authority_key, ExtendedKeyUsageOID.SERVER_AUTH),
        "server_key": pem(server_key),
        "worker": certificate("torchrelay worker", worker_key, authority_key, ExtendedKeyUsageOID.CLIENT_AUTH),
        "worker_key": pem(worker_key),
    }


class WorkerActor:
    """The actor that Ray places: it unpacks a worker's files, and supervises its process. Ray sends its code to
    nodes by value: a node needs Ray and the packages of the handlers, and gets `ts` with the model."""

    def __init__(self, sent: list[Any]) -> None:
        """Starts the worker at once: Ray's first call of a method comes later, on a busy machine by seconds. `sent`: a
        reference to the instructions and the packages, since Ray's head would store the arguments themselves, with
        the worker's key."""
        node = {
            "id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "gpus": [str(one) for one in ray.get_gpu_ids()],
        }
        self._status: Future[int | None] = Future()
        threading.Thread(target=self._live, args=(node, *sent), daemon=True).start()

    def run(self) -> int | None:
        """Returns the worker's exit status, after its end. The actor ends afterwards by itself."""
        return self._status.result()

    def _live(self, node: dict[str, Any], sent: Any) -> None:
        try:
            self._status.set_result(self._run(node, *ray.get(sent)))
        except BaseException as error:
            self._status.set_exception(error)
        finally:
            timer = threading.Timer(LINGER_S, os._exit, (0,))
            timer.daemon = True
            timer.start()

    @staticmethod
    def _run(node: dict[str, Any], instructions: dict[str, Any], packages: list[dict[str, Any]]) -> int | None:

        def fetch(package: dict[str, Any]) -> Callable[[], Any]:
            return lambda: (ray.get(piece) for piece in package["pieces"])

        code, model = packages
        with (
            packing.unpacked(code["digest"], code["bytes"], fetch(code)) as code_dir,
            packing.unpacked(model["digest"], model["bytes"], fetch(model)) as model_dir,
        ):
            sys.path.insert(0, str(code_dir))
            agents = importlib.import_module("ts.runtime.agent")
            instructions |= {"model_dir": str(model_dir), "metrics_config": str(model_dir / METRICS_FILE)}
            status: int | None = agents.Agent(instructions, node).run()
            return status


@dataclass(slots=True)
class _Package:
    print: str
    digest: str
    size_bytes: int
    pieces: list[Any]

    def described(self) -> dict[str, Any]:
        return {"digest": self.digest, "bytes": self.size_bytes, "pieces": self.pieces}


class _Packages:
    """The packages that have been put into Ray's store, by the folder of their files."""

    def __init__(self) -> None:
        self._found: dict[str, _Package] = {}
        self._packing: dict[str, threading.Lock] = {}
        self._using = threading.Lock()

    def of(
        self, root: str, extra: dict[str, str], below: str = "", made: Mapping[str, bytes] | None = None
    ) -> _Package:
        """The package of a folder's present files; the rest is as for `packed_pieces`. Raises OSError."""
        with self._using:
            lock = self._packing.setdefault(root, threading.Lock())
        with lock:
            seen = packing.print_of(root, sorted(extra.values()))
            found = self._found.get(root)
            if found is None or found.print != seen:
                digest, size, pieces = hashlib.sha256(), 0, []
                for piece in packing.packed_pieces(root, extra, below, made):
                    digest.update(piece)
                    size += len(piece)
                    pieces.append(ray.put(piece))
                found = self._found[root] = _Package(seen, digest.hexdigest(), size, pieces)
            return found

    def forget(self, root: str) -> None:
        with self._using:
            self._found.pop(root, None)
            self._packing.pop(root, None)


class _Groups:
    """The placement groups of models, and their free bundles."""

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[Any, set[int]]]] = {}
        self._lock = threading.Lock()

    def take(
        self,
        key: str,
        strategy: str,
        count: int,
        bundle: dict[str, float],
        labels: dict[str, str],
        avoid: Collection[str] = (),
    ) -> tuple[Any, int]:
        """A group with a free bundle, and the bundle's index: one on another node than those to `avoid`, if there is
        any, since Ray moves the bundles of a dead node only when it has noticed the death. A group that is on such
        nodes as a whole is replaced by a new one elsewhere; it is removed when its last worker has given its bundle
        back. `labels`: selectors for the nodes of all bundles."""
        with self._lock:
            known = self._groups.setdefault(key, [])
            places = [(group, index, free) for group, free in known for index in sorted(free)]
            if avoid and places:
                lost = {group.id: _bundles_on(group, avoid) for group, _ in known}
                places = [place for place in places if len(lost[place[0].id]) < max(1, count)]
                places.sort(key=lambda place: place[1] in lost[place[0].id])
            if places:
                group, index, free = places[0]
                free.remove(index)
                return group, index
            labels = avoiding(labels, avoid)
            group = placement_group(
                [bundle] * max(1, count),
                strategy=strategy,
                lifetime="detached",
                bundle_label_selector=[labels] * max(1, count) if labels else None,
            )
            known.append((group, set(range(1, max(1, count)))))
            return group, 0

    def give(self, key: str, group: Any, index: int, count: int) -> None:
        """Gives a bundle back; a group without a taken one is removed."""
        with self._lock:
            known = self._groups.get(key, [])
            for entry in known:
                if entry[0].id == group.id:
                    entry[1].add(index)
                    if len(entry[1]) >= max(1, count):
                        known.remove(entry)
                        remove_placement_group(group)
                    return


def avoiding(labels: Mapping[str, str], nodes: Collection[str]) -> dict[str, str]:
    """Label selectors that also leave out these nodes, unless they name nodes themselves."""
    return {NODE_LABEL: f"!in({','.join(nodes)})", **labels} if nodes else dict(labels)


def _bundles_on(group: Any, nodes: Collection[str]) -> list[int]:
    """The bundles of a group that are on these nodes, as far as Ray knows."""
    return [index for index, node in placement_group_table(group)["bundles_to_node_id"].items() if node in nodes]


class Bridge:
    """Orders of the server to Ray, and Ray's news to the server."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._actors: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._changing = threading.Lock()
        self._packages, self._groups = _Packages(), _Groups()
        self._pool = ThreadPoolExecutor(THREADS)
        self._bundles: dict[int, tuple[str, Any, int, int]] = {}
        self._code = str(Path(ts.version.__file__).parent)
        self._bytecode = self._pool.submit(packing.bytecode_of, self._code, "ts/")

    def send(self, event: str, **more: Any) -> None:
        line = json.dumps({"event": event, **more}).encode() + b"\n"
        with self._sending:
            self._sock.sendall(line)

    def obey(self) -> None:
        """Executes orders until the server closes the socket."""
        rest = b""
        while data := self._sock.recv(1 << 20):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                getattr(self, "_" + order.pop("order"))(order)

    def _place(self, order: dict[str, Any]) -> None:
        self._pool.submit(self._placed, order)

    def _placed(self, order: dict[str, Any]) -> None:
        number = order["id"]
        try:
            extra = {METRICS_FILE: order["metrics_config"]} if order["metrics_config"] else {}
            code = self._packages.of(self._code, {}, "ts/", self._bytecode.result())
            model = self._packages.of(order["instructions"]["origin"], extra)
            sent = ray.put((order["instructions"], [code.described(), model.described()]))
            actor = ray.remote(WorkerActor).options(**self._options(number, order)).remote([sent])
            ends = actor.run.remote()
        except Exception as error:
            self.send("ended", id=number, reason=f"Ray refused the worker: {type(error).__name__}: {error}", lost=False)
            self._release(number)
            return
        with self._changing:
            unwanted = number in self._ended
            if not unwanted:
                self._actors[number] = actor
        if unwanted:
            self._kill(actor)
            self._release(number)
            return
        tell = _fatal(partial(self._tell_end, number, ends))
        ends.future().add_done_callback(lambda _: self._pool.submit(tell))

    def _options(self, number: int, order: Mapping[str, Any]) -> dict[str, Any]:
        wanted = order["request"]
        options: dict[str, Any] = {
            "num_cpus": wanted["num_cpus"],
            "num_gpus": wanted["num_gpus"],
            "max_restarts": 0,
            "max_task_retries": 0,
            "lifetime": "detached",
            "namespace": NAMESPACE,
        }
        if wanted["memory_bytes"]:
            options["memory"] = wanted["memory_bytes"]
        if wanted["resources"]:
            options["resources"] = wanted["resources"]
        if wanted["packages"]:
            options["runtime_env"] = {"pip": {"packages": wanted["packages"], "pip_check": False}}
        labels = dict(wanted["labels"])
        if wanted["group"]:
            bundle = {"CPU": wanted["num_cpus"], "GPU": wanted["num_gpus"], "memory": wanted["memory_bytes"]}
            bundle = {name: amount for name, amount in {**bundle, **wanted["resources"]}.items() if amount}
            group, index = self._groups.take(
                order["model"], wanted["group"], wanted["bundles"], bundle, labels, order["avoid"]
            )
            self._bundles[number] = order["model"], group, index, wanted["bundles"]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, index)
            return options
        labels = {NODE_LABEL: order["node"], **labels} if order["node"] else avoiding(labels, order["avoid"])
        if labels:
            options["label_selector"] = labels
        return options

    def _release(self, number: int) -> None:
        held = self._bundles.pop(number, None)
        if held is not None:
            self._groups.give(*held)

    def _end(self, order: dict[str, Any]) -> None:
        number = order["id"]
        with self._changing:
            found = self._actors.pop(number, None)
            self._ended.add(number)
        if found is not None:
            self._pool.submit(self._kill, found)
            self._pool.submit(self._release, number)

    @staticmethod
    def _kill(actor: Any) -> None:
        ray.kill(actor, no_restart=True)

    def _spare(self, order: dict[str, Any]) -> None:
        self._pool.submit(self._prestart, order["address"], order["count"])

    @staticmethod
    def _prestart(address: str, count: int) -> None:
        """Asks a node to start processes for later actors. Without one an actor only starts later. Ray has this call
        for its own use: it may be missing in another version."""
        try:
            from ray._private.grpc_utils import init_grpc_channel
            from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

            wanted = node_manager_pb2.PrestartWorkersRequest(
                language=common_pb2.Language.PYTHON,
                job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
                num_workers=count,
            )
            with init_grpc_channel(address) as channel:
                node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(wanted, timeout=SPARE_S_MAX)
        except Exception as error:
            reason = _first_lines(str(error))
            print(f"No spare process on {address}: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)

    def _forget(self, order: dict[str, Any]) -> None:
        self._packages.forget(order["root"])

    # --- Ray's news

    def _tell_end(self, number: int, ends: Any) -> None:
        reason, lost = "", False
        try:
            ray.get(ends)
        except Exception as error:
            reason, lost = _first_lines(str(error)), isinstance(error, ray.exceptions.RayActorError)
        with self._changing:
            found = self._actors.pop(number, None)
        if found is not None:
            self._kill(found)
            self._release(number)
            self.send("ended", id=number, reason=reason, lost=lost)

    def watch_cluster(self) -> None:
        while True:
            free = available_resources_per_node()
            nodes = [
                {
                    "id": node["NodeID"],
                    "address": node["NodeManagerAddress"],
                    "alive": node["Alive"],
                    "total": node["Resources"],
                    "free": free.get(node["NodeID"], {}),
                    "labels": node.get("Labels") or {},
                    "port": node["NodeManagerPort"],
                }
                for node in ray.nodes()
            ]
            self.send("cluster", nodes=nodes)
            time.sleep(LOOK_S)


def _first_lines(text: str, chars_max: int = 600) -> str:
    return " ".join(text.split())[:chars_max]


def _fatal(watch: Callable[[], None]) -> Callable[[], None]:
    """Ends the process when necessary work of a thread has failed."""

    def run() -> None:
        try:
            watch()
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    bridge = Bridge(socket.socket(fileno=arguments.fd))
    bridge.send("certificates", **made_certificates())
    ray.cloudpickle.register_pickle_by_value(packing)
    try:
        ray.init(address=arguments.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        bridge.send("refused", reason=f"{type(error).__name__}: {_first_lines(str(error))}")
        sys.exit(1)
    bridge.send("connected", host=ray.util.get_node_ip_address(), version=ray.__version__)
    threading.Thread(target=_fatal(bridge.watch_cluster), daemon=True).start()
    try:
        bridge.obey()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
