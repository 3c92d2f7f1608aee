"""Makes third_party/jobset/schema.json: python -m tests.launch.jobset_schema, where kubeflow-trainer-api is installed.

The models of that package become one JSON schema: unknown fields are errors, fields have the names that YAML has,
quantities may be numbers, descriptions are left out. The enumerations are those that the descriptions name.
"""

import json
import pathlib

PATH = pathlib.Path(__file__).parents[2] / 'third_party' / 'jobset' / 'schema.json'
ACTIONS = (
    *('FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts', 'RestartJob'),
    'RestartJobAndIgnoreMaxRestarts',
)
ENUMERATIONS = {
    ('JobsetV1alpha2FailurePolicyRule', 'action'): ACTIONS,
    ('JobsetV1alpha2SuccessPolicy', 'operator'): ('All', 'Any'),
    ('IoK8sApiBatchV1JobSpec', 'completionMode'): ('NonIndexed', 'Indexed'),
    ('IoK8sApiCoreV1PodSpec', 'restartPolicy'): ('Always', 'OnFailure', 'Never'),
    ('IoK8sApiBatchV1PodFailurePolicyRule', 'action'): ('FailJob', 'FailIndex', 'Ignore', 'Count'),
    ('IoK8sApiBatchV1PodFailurePolicyOnExitCodesRequirement', 'operator'): ('In', 'NotIn'),
}
_SAID = ('description', 'title', 'default')


def main():
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    schema = JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    definitions = schema['$defs']
    for node in (schema, *definitions.values()):
        if 'properties' in node:
            node['additionalProperties'] = False
    for (model, field), values in ENUMERATIONS.items():
        definitions[model]['properties'][field] = {'type': 'string', 'enum': list(values)}
    definitions['IoK8sApimachineryPkgApiResourceQuantity'] = {'type': ['string', 'integer', 'number']}
    definitions['IoK8sApimachineryPkgUtilIntstrIntOrString'] = {'type': ['string', 'integer']}
    schema = strip(schema)
    schema['required'] = ['apiVersion', 'kind', 'metadata', 'spec']
    schema['properties']['apiVersion'] = {'const': 'jobset.x-k8s.io/v1alpha2'}
    schema['properties']['kind'] = {'const': 'JobSet'}
    PATH.write_text(json.dumps(schema, separators=(',', ':'), sort_keys=True) + '\n')


def strip(node, names=False):
    """Without descriptions; below `properties` and `$defs` the keys are names of fields and models."""
    if isinstance(node, list):
        return [strip(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get('anyOf') and {'type': 'null'} in node['anyOf'] and len(node['anyOf']) == 2:
        return strip(next(choice for choice in node['anyOf'] if choice != {'type': 'null'}))
    return {
        key: strip(value, key in ('properties', '$defs')) for key, value in node.items() if names or key not in _SAID
    }


if __name__ == '__main__':
    main()
