"""grpcurl without proto files, with the JSON that MAX's page has: text as code points, there and back."""

import json
import subprocess
import sys
from pathlib import Path

GRPC, HTTP = sys.argv[1:3]
COMMAND = [str(Path(sys.executable).parent / "grpcurl"), "-plaintext"]
SERVICE = "inference.GRPCInferenceService"


def run(*words):
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)


def body(model, text):
    tensor = {"name": "prompt", "contents": {"int_contents": [ord(one) for one in text]}}
    return json.dumps({"model_name": model, "parameters": {"max_tokens": {"string_param": "500"}}, "inputs": [tensor]})


done = run(GRPC, "list")
assert SERVICE in done.stdout.splitlines(), done
for method in (f"{SERVICE}.ModelInfer", f"{SERVICE}/ModelInfer"):
    done = run("-d", body("upper", "What is life?"), GRPC, method)
    assert done.returncode == 0, done
    points = json.loads(done.stdout)["outputs"][0]["contents"]["int_contents"]
    assert "".join(map(chr, points)) == "WHAT IS LIFE?", done
done = run("-d", body("text-model", "one two"), GRPC, f"{SERVICE}.ModelInferStream")
assert done.returncode == 0 and done.stdout.count("int_contents") >= 2, done
done = run("-d", body("nobody", "x"), GRPC, f"{SERVICE}.ModelInfer")
assert done.returncode != 0 and "nobody" in done.stderr, done
print("grpcurl ok")
