"""The comparison with other model servers: models, servers, loads, scenarios, and the page made of them."""
