"""The configuration keys of reference implementations, from transformers where it is installed.

`tests/data/models/reference_keys.json` holds what `families()` returned, and the keys of GGUF files that llama.cpp
reads: for every architecture, and for each. To record the former again, in an environment with transformers:
    PYTHONPATH=src:tests python -m models.reference_keys
A family that transformers lacks keeps its record, which is of the model's own configuration class.
"""

import importlib.util
import inspect
import json
import re
from pathlib import Path

RECORD = Path(__file__).parents[1] / "data" / "models" / "reference_keys.json"


def families(model_types):
    """{model_type: record} of transformers: "defaults": {key: value}; "read": keys that the model's source reads;
    "aliases": {other name of a key: key}; "older": names of keys that its configuration class replaces.
    """
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    found = {}
    for model_type in model_types:
        config_class = CONFIG_MAPPING[model_type]
        name = config_class.__module__.replace("configuration_", "modeling_")
        if importlib.util.find_spec(name) is None:  # a type that is computed by the model of another
            name = MODEL_MAPPING[config_class].__module__
        module = importlib.import_module(name)
        read = set(re.findall(r"\bconfig\.(\w+)", inspect.getsource(module)))
        defaults = json.loads(config_class().to_json_string(use_diff=False))
        older = set(re.findall(r"\bkwargs\.(?:pop|get)\(\"(\w+)\"", inspect.getsource(config_class)))
        found[model_type] = {
            "defaults": defaults,
            "read": sorted(read & defaults.keys()),
            "aliases": config_class.attribute_map,
            "older": sorted(older - defaults.keys()),
        }
    return found


def main():
    import transformers

    from foreword.models.families import ENCODER_FAMILIES, FAMILIES

    record = json.loads(RECORD.read_text())
    types = [*FAMILIES, *ENCODER_FAMILIES]
    found = families(name for name in types if name in transformers.CONFIG_MAPPING)
    record["families"] = {name: found.get(name) or record["families"][name] for name in types}
    record["transformers"] = transformers.__version__
    families_text = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.pop("families").items()
    )
    rest = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    RECORD.write_text(f'{{{rest},\n"families": {{\n{families_text}\n}}}}\n')


if __name__ == "__main__":
    main()
