"""A fake of Google's Pub/Sub on this machine: topics, subscriptions, and redelivery until acknowledged."""

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1 import types


class MessageService:
    """The service's state. Unknown calls are refused: grpc answers UNIMPLEMENTED.

    Attributes:
      address: Value of `PUBSUB_EMULATOR_HOST`.
    """

    def __init__(self) -> None:
        self.address = ""
        self._waiting: dict[str, dict[str, types.PubsubMessage]] = {}
        self._topics: dict[str, list[str]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self.answers: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
            "Publisher/CreateTopic": (types.Topic, types.Topic, self._create_topic),
            "Publisher/Publish": (types.PublishRequest, types.PublishResponse, self._publish),
            "Subscriber/CreateSubscription": (types.Subscription, types.Subscription, self._subscribe),
            "Subscriber/Pull": (types.PullRequest, types.PullResponse, self._pull),
            "Subscriber/Acknowledge": (types.AcknowledgeRequest, None, self._acknowledge),
        }

    def _create_topic(self, topic: types.Topic) -> types.Topic:
        self._topics[topic.name] = []
        return topic

    def _subscribe(self, subscription: types.Subscription) -> types.Subscription:
        self._topics[subscription.topic].append(subscription.name)
        self._waiting[subscription.name] = {}
        return subscription

    def _publish(self, request: types.PublishRequest) -> types.PublishResponse:
        ids = []
        for message in request.messages:
            self._count += 1
            ids.append(str(self._count))
            message.message_id = ids[-1]
            message.publish_time = datetime.datetime.now(datetime.UTC)
            for subscription in self._topics[request.topic]:
                self._waiting[subscription][ids[-1]] = message
        return types.PublishResponse(message_ids=ids)

    def _pull(self, request: types.PullRequest) -> types.PullResponse:
        messages = list(self._waiting[request.subscription].values())[: request.max_messages]
        return types.PullResponse(
            received_messages=[
                types.ReceivedMessage(ack_id=message.message_id, message=message) for message in messages
            ]
        )

    def _acknowledge(self, request: types.AcknowledgeRequest) -> Empty:
        for ack_id in request.ack_ids:
            self._waiting[request.subscription].pop(ack_id, None)
        return Empty()

    def handler(self, name: str) -> grpc.RpcMethodHandler:
        """Returns the handler for the calls of one method."""
        request, response, answer = self.answers[name]

        def locked(message: Any, _context: grpc.ServicerContext) -> Any:
            with self._lock:
                return answer(message)

        return grpc.unary_unary_rpc_method_handler(
            locked,
            request_deserializer=request.deserialize,
            response_serializer=Empty.SerializeToString if response is None else response.serialize,
        )


@contextlib.contextmanager
def message_service() -> Iterator[MessageService]:
    """Gives a service that answers until the block ends."""
    service = MessageService()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    for group in ("Publisher", "Subscriber"):
        handlers = {name.partition("/")[2]: service.handler(name) for name in service.answers if name.startswith(group)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"google.pubsub.v1.{group}", handlers),))
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield service
    finally:
        server.stop(None).wait()
