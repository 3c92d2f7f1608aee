"""Bodies drawn from the schemas of the page of routes: taken, or refused by name, and never an error of the server."""

import collections
import functools
import json
import random

import jsonschema
import pytest

from areal_jax.rollout.http.server.openapi import describe_server, list_operations
from areal_jax.rollout.http.wire.exchange import RequestError
from tests.rollout.http.server.examples import parser_of
from tests.rollout.http.server.test_malformed import BAD, post, put_to_a_server

WITH_BODY = [operation for operation in list_operations() if operation.body is not None]
DRAWS = 150  # of a route: a few tenths of a second
SENT = 12  # of a route, to a server
TEXTS = ['', 'x', 'Hello', 'é🙂', 'auto', '7']
DEEP = 6  # levels behind which nothing optional is drawn


@functools.cache
def schema_of(path):
    body = describe_server()['paths'][path]['post']['requestBody']
    return body['content']['application/json']['schema']


class Drawing:
    """Values of schemas, with a seed; with `spoils` each value inside is another one with that probability."""

    def __init__(self, seed, spoils=0.0):
        self.random, self.spoils = random.Random(seed), spoils

    def draw(self, schema, level=0):
        if self.random.random() < self.spoils:
            return self.random.choice(BAD)
        if 'anyOf' in schema:
            return self.draw(self.random.choice(schema['anyOf']), level)
        if 'enum' in schema:
            return self.random.choice(schema['enum'])
        if 'const' in schema:
            return schema['const']
        kinds = schema.get('type', ['null', 'string', 'object', 'boolean'])
        kind = kinds if isinstance(kinds, str) else self.random.choice(kinds)
        return getattr(self, f'draw_{kind}')(schema, level)

    def draw_null(self, schema, level):
        return None

    def draw_boolean(self, schema, level):
        return self.random.random() < 0.5

    def draw_integer(self, schema, level):
        least, most = schema.get('minimum', -(2**40)), schema.get('maximum', 2**40)
        few = max(least, 0)
        return self.random.choice([least, most, few, min(few + self.random.randrange(9), most)])

    def draw_number(self, schema, level):
        least, most = schema.get('minimum', schema.get('exclusiveMinimum', -9.0) + 0.25), schema.get('maximum', 9.0)
        return self.random.choice([least, most, self.random.uniform(least, most)])

    def draw_string(self, schema, level):
        few = [text for text in TEXTS if len(text) >= schema.get('minLength', 0)]
        return self.random.choice(few)

    def draw_array(self, schema, level):
        least = schema.get('minItems', 0)
        most = min(schema.get('maxItems', 3), 3)
        return [self.draw(schema['items'], level + 1) for _ in range(self.random.randint(least, max(least, most)))]

    def draw_object(self, schema, level):
        if 'propertyNames' in schema:
            more = schema['additionalProperties']
            return {str(self.random.randrange(9)): self.draw(more) for _ in range(self.random.randrange(3))}
        found = {}
        for name, inside in schema.get('properties', {}).items():
            needed = name in schema.get('required', ())
            if needed or (level < DEEP and self.random.random() < 0.2):
                found[name] = self.draw(inside, level + 1)
        if self.random.random() < self.spoils:
            found[self.random.choice(['surprise', 'type', '(one)', '\0', ''])] = 1
        return found


def draw_body(path, seed, spoils=0.0):
    return Drawing(f'{path} {seed}', spoils).draw(schema_of(path))


def ask(parse, body):
    """'taken', or the field that is refused."""
    try:
        parse(body)
    except RequestError as error:
        return error.field
    return 'taken'


@pytest.mark.parametrize('operation', WITH_BODY, ids=lambda operation: operation.path)
def test_a_drawn_body_is_taken_or_refused_by_name(operation):
    parse, schema = parser_of(operation), jsonschema.Draft202012Validator(schema_of(operation.path))
    outcomes = collections.Counter()
    for seed in range(DRAWS):
        body = draw_body(operation.path, seed)
        assert schema.is_valid(body), (seed, body)
        outcomes[ask(parse, body)] += 1
    assert outcomes['taken'] > DRAWS / 50, outcomes


@pytest.mark.parametrize('operation', WITH_BODY, ids=lambda operation: operation.path)
def test_a_spoilt_body_that_is_taken_fits_the_schema(operation):
    parse, schema = parser_of(operation), jsonschema.Draft202012Validator(schema_of(operation.path))
    for seed in range(DRAWS):
        body = draw_body(operation.path, seed, spoils=0.1)
        assert ask(parse, body) != 'taken' or schema.is_valid(body) or 'input_ids' in body, (seed, body)


def test_no_drawn_body_is_an_error_of_the_server(caplog):
    kinds = {
        f'{operation.path} {seed}': post(
            operation.path, json.dumps(draw_body(operation.path, seed, 0.05 * (seed % 2))).encode()
        )
        for operation in WITH_BODY
        for seed in range(SENT)
    }
    assert put_to_a_server(kinds, caplog) == {}
