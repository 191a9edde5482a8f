"""Ray Serve's interface to the router; Ray sends this module to wherever requests are sent from."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvant.serve.routed_request import RoutedRequest
from kvant.serve.routing import PrefixRouter


class PageRouter(RequestRouter):  # type: ignore[misc]
    """Requests go where their pages are."""

    def initialize_state(self) -> None:
        self._router = PrefixRouter[str]()
        self._reported_replicas = set[
            str
        ]()  # replicas that said what they had before this router was there

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        named = {one.replica_id.unique_id: one for one in replicas}
        for gone in set(self._router.servers) - set(named):
            self._router.remove_server(gone)
        self._reported_replicas &= set(named)
        for name, replica in named.items():
            self._router.add_server(name)
            if name not in self._reported_replicas and (told := replica.routing_stats):
                self._reported_replicas.add(name)
                self._router.add_keys(name, told["keys"])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.remove_server(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        named = {one.replica_id.unique_id: one for one in candidate_replicas}
        asked = _get_request(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if asked is None:
            return [candidate_replicas]
        ranked = [
            name
            for name in self._router.rank_servers(asked.page_keys, asked.num_pages)
            if name in named
        ]
        if ranked:  # now, and not once it is there: others that begin alike may come before
            self._router.assign_request(ranked[0], asked.page_keys)
        return [[named[name]] for name in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        if replica_id.unique_id in self._router.servers:
            self._router.start_request(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._router.finish_request(replica_id.unique_id)


def _get_request(pending_request: PendingRequest | None) -> RoutedRequest | None:
    found = (
        pending_request.args[0] if pending_request is not None and pending_request.args else None
    )
    return found if isinstance(found, RoutedRequest) else None
