"""`quire.v1.ModelService`: describes the served model from the core's state."""

from protos.quire.link.v1 import link_pb2
from quire.v1 import model_pb2, model_pb2_grpc
from services.calls.context import Services
from services.grpc.boundary import Context
from services.requests.validation import check_model


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Model service for the one served model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        """List the served model; empty before the first worker has joined."""
        model = self._services.link.model
        return model_pb2.ListModelsResponse(models=[] if model is None else [self._describe(model)])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        """Return the description of one model."""
        model = self._services.served_model()
        check_model(request.name, model)
        return model_pb2.GetModelResponse(model=self._describe(model))

    def _describe(self, model: link_pb2.ServedModel) -> model_pb2.Model:
        return model_pb2.Model(
            name=model.name,
            architecture=model.architecture,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            has_chat_template=self._services.tokenizer.has_chat_template,
            fingerprint=model.fingerprint,
            embedding_size=model.hidden_size,
            sampling_defaults=self._services.defaults.values,
        )
