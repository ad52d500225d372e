"""/openapi.json describes what the routes take."""

from itertools import islice, product

import jsonschema
import pytest
from server_rig import serving

from foreword.server.failures import answered
from foreword.server.operations import served_by

WITHOUT_WHAT_IT_NAMES = {
    "/abort": 404,
    "/api/pull": 400,
    "/v1/load_lora_adapter": 403,
    "/v1/unload_lora_adapter": 404,
    "/slots/{id}": 403,
    "/v1/batches": 400,
    "/v1/batches/{id}/cancel": 400,
}
"""Statuses of examples about a request, an adapter, or further models that the server of the tests does not have."""


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, max_requests=64) as running:
        yield running


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json").json()


def bodies(document) -> dict[str, dict]:
    """Path → schema of its body, of those that are JSON; forms have tests of their own."""
    found = {
        path: methods["post"]["requestBody"]["content"]
        for path, methods in document["paths"].items()
        if "post" in methods
    }
    forms = {path for path, content in found.items() if "multipart/form-data" in content}
    assert forms == {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/files"}
    return {path: found[path]["application/json"]["schema"] for path in found.keys() - forms}


def test_the_failures_of_a_route_are_those_of_the_table(document):
    for path, methods in document["paths"].items():
        form = "_text" if path.startswith("/api/") else ""
        for operation in methods.values():
            named = operation["responses"].keys() - {"200"}
            assert {"400", "404", "405", "431", "500", "503"} <= named <= {str(one.status) for one in answered()}
            assert {operation["responses"][status]["$ref"] for status in named} == {
                f"#/components/responses/{status}{form}" for status in named
            }
    completions = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"413", "429", "504"} <= completions.keys()
    described = document["components"]["responses"]
    assert (
        described["429"]["description"]
        == "`full`: The server is full. Send it again after as many seconds as the header `Retry-After` has.\n"
        "`key_limit`: The API key has reached one of its limits: `key_limit`. Send it again after as many seconds as "
        "the header `Retry-After` has."
    )
    assert described.keys() == {f"{one.status}{form}" for one in answered() for form in ("", "_text")}


def test_a_failure_is_as_it_is_described(server, document):
    """Ollama's interface has it, too, where the error is a text."""
    with server.client() as client:
        for path, methods in document["paths"].items():
            for method in methods.keys() - {"get"}:
                answer = client.request(method.upper(), path.replace("{id}", "none"), content=b"[]")
                assert answer.status_code >= 400, path
                (named,) = methods[method]["responses"][str(answer.status_code)].values()
                described = document["components"]["responses"][named.rpartition("/")[2]]
                jsonschema.validate(answer.json(), described["content"]["application/json"]["schema"])


def test_every_route_is_described(server, document):
    paths = {operation.path.replace(":path", "") for operation in served_by(server.context)}
    assert set(document["paths"]) == paths
    assert all(operation["summary"] for methods in document["paths"].values() for operation in methods.values())


@pytest.mark.long
def test_the_examples_follow_their_schemas_and_are_served(server, document):
    for path, schema in bodies(document).items():
        for example in schema["examples"]:
            jsonschema.validate(example, schema)
            names = {"model": "talker"} if "model" in example else {}
            status = server.post(path, {**example, **names}).status_code
            assert status == WITHOUT_WHAT_IT_NAMES.get(path, 200), path


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", range(4))
def test_the_server_refuses_what_the_schema_refuses(server, document, part):
    """One value of every type for each field, and an unknown one; a part has every fourth of them."""
    values = [True, 3, 0.5, "x", {"x": 1}, [{"x": 1}], [[1]], ["x"]]
    refused = 0
    with server.client() as client:
        for path, schema in bodies(document).items():
            validator = jsonschema.Draft202012Validator(schema)
            known = {"model": "talker"} if "model" in schema["properties"] else {}
            given = product([*schema["properties"], "unknown"], values)
            for name, value in islice(given, part, None, 4):
                body = {**schema["examples"][0], **known, name: value}
                if not validator.is_valid(body):
                    response = client.post(path, json=body)
                    assert response.status_code == 400, (path, name, value, response.text)
                    refused += 1
    assert refused > 125


def test_keys_are_told_where_they_are_needed(talker, document):
    assert not any(o["security"] for methods in document["paths"].values() for o in methods.values())
    with serving(talker, api_key=("one",), admin_key="root") as running:
        paths = running.get("/openapi.json", headers={"x-api-key": "one"}).json()["paths"]
    assert paths["/health"]["get"]["security"] == []
    assert paths["/v1/models"]["get"]["security"] == [{"API key": []}]
    assert paths["/abort"]["post"]["security"] == [{"admin key": []}]
