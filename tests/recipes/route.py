"""A server route: one that answers with a number."""

from pathlib import Path

from recipes.recipe import Edit, Recipe, after, before

TEST = "tests/server/test_dummy_route.py"
MODULE = "src/foreword/server/tokens.py"
HANDLER = """async def _dummy(context: Context, request: Request) -> Response:
    return reply({"dummy": 7})


"""
ROW = '    Operation("/dummy", _dummy, access="key", summary="Return the number 7."),\n'
OF_ROUTES = (
    "every_route_is_described",
    "the_failures_of_a_route_are_those_of_the_table",
    "keys_are_told_where_they_are_needed",
)
RECIPE = Recipe(
    heading="A server route",
    test=TEST,
    edits=(
        Edit(MODULE, before("OPERATIONS = (\n", HANDLER), TEST),
        Edit(MODULE, after("\nOPERATIONS = (\n", ROW), TEST),
    ),
    proofs=(
        *(f"tests/server/test_openapi.py::test_{name}" for name in OF_ROUTES),
        "tests/cluster/test_protocol.py::test_each_path_and_method_has_the_status_of_its_operation_and_key",
        "tests/cluster/test_front.py",
    ),
    not_followed={
        "src/foreword/openai/": "the dummy has no body",
        "src/foreword/server/operations.py": "the dummy is in a module that exists",
    },
)


def test_the_route_answers_behind_the_key_and_is_described(talker):
    from server_rig import serving  # in the folder that the copy has this file in

    with serving(talker, api_key=("one",)) as server:
        assert server.get("/dummy").status_code == 401
        key = {"Authorization": "Bearer one"}
        assert server.get("/dummy", headers=key).json() == {"dummy": 7}
        described = server.get("/openapi.json", headers=key).json()["paths"]["/dummy"]["get"]
    assert described["summary"] == "Return the number 7."
    assert described["security"] == [{"API key": []}]
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert "| `GET /dummy` | key | one | Return the number 7. |" in page
