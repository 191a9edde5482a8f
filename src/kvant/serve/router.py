"""Adapter from Ray Serve's router interface to PrefixRouter.

Ray pickles this module to every process that sends requests.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvant.serve.routed_request import RoutedRequest
from kvant.serve.routing import PrefixRouter


class PageRouter(RequestRouter):  # type: ignore[misc]
    """Send each request to the replica that probably has its pages in cache."""

    def initialize_state(self) -> None:
        self._router = PrefixRouter[str]()
        self._reported_replicas = set[str]()  # whose keys from before this router are known

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in set(self._router.servers) - set(by_name):
            self._router.remove_server(name)
        self._reported_replicas &= set(by_name)
        for name, replica in by_name.items():
            self._router.add_server(name)
            if name not in self._reported_replicas and (stats := replica.routing_stats):
                self._reported_replicas.add(name)
                self._router.add_keys(name, stats["keys"])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.remove_server(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _get_request(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if request is None:
            return [candidate_replicas]
        ranked = [
            name
            for name in self._router.rank_servers(request.page_keys, request.num_pages)
            if name in by_name
        ]
        if ranked:  # now, not in on_send_request: requests with the same prefix may follow at once
            self._router.assign_request(ranked[0], request.page_keys)
        return [[by_name[name]] for name in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        if replica_id.unique_id in self._router.servers:
            self._router.start_request(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._router.finish_request(replica_id.unique_id)


def _get_request(pending_request: PendingRequest | None) -> RoutedRequest | None:
    argument = (
        pending_request.args[0] if pending_request is not None and pending_request.args else None
    )
    return argument if isinstance(argument, RoutedRequest) else None
