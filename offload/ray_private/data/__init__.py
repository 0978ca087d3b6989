"""The plans and blocks of ``ray.data.Dataset``.

* ``dataset_plan``, with ``executed``, ``drafts`` and ``refusals``: a plan as units of work for the pool.
* ``steps``: how a preprocessing process runs the steps of a unit.
* ``blocks``: the blocks of a Dataset that Ray Data executes.

Only ``blocks`` and this module may be imported where a Ray lacks the plans: :data:`PLANS` says whether it does.
"""

from offload.ray_private.part import Part

_LOGICAL = "ray.data._internal.logical.operators"
_OPERATORS = "ray.data._internal.execution.operators"
_PARQUET = "ray.data._internal.datasource_v2.formats.parquet"

PLANS = Part(
    name="plans of Datasets",
    purpose="run the read tasks and steps of a ray.data.Dataset in offload's own processes",
    without="Ray Data executes the Dataset, in its own order",
    cost="10 to 20 ms of CPU time for each task, imports anew in each pass, no shuffling, and an interrupted epoch starts again without an "
    "id_column",
    needs=(
        *(
            f"{_LOGICAL}:{name}"
            for name in (
                *(
                    "AbstractFrom",
                    "Aggregate",
                    "Download",
                    "Filter",
                    "FlatMap",
                    "InputData",
                    "Join",
                    "Limit",
                    "ListFiles",
                ),
                *("MapBatches", "MapRows", "Project", "RandomizeBlocks", "RandomShuffle", "Read", "ReadFiles"),
                *("Repartition", "Sort", "Union", "Zip"),
            )
        ),
        "ray.data._internal.logical.interfaces:LogicalPlan(dag, context)",
        "ray.data._internal.logical.optimizers:LogicalOptimizer.optimize",
        "ray.data._internal.planner:create_planner",
        "ray.data._internal.compute:TaskPoolStrategy",
        "ray.data._internal.datasource.torch_datasource:TorchDatasource",
        f"{_PARQUET}.footer_file_indexer:FooterFileIndexer",
        f"{_PARQUET}.footer_file_indexer:_file_chunks_to_manifest",
        f"{_PARQUET}.footer_reader:FooterReader.read_footers",
        f"{_PARQUET}.parquet_file_reader:_READER_CPU_COUNT",
        "ray.data._internal.execution.interfaces.task_context:TaskContext(task_idx, op_name)",
        f"{_OPERATORS}.input_data_buffer:InputDataBuffer",
        f"{_OPERATORS}.limit_operator:LimitOperator",
        f"{_OPERATORS}.map_operator:MapOperator.get_map_transformer",
        f"{_OPERATORS}.union_operator:UnionOperator",
        f"{_OPERATORS}.map_transformer:BatchMapTransformFn",
        f"{_OPERATORS}.map_transformer:MapTransformer.get_transform_fns",
        f"{_OPERATORS}.map_transformer:MapTransformFnDataType.Row",
        "ray.data._internal.planner.plan_expression.synthetic_impl:eval_random",
        "ray.data.exceptions:SystemException",
        "ray.data.expressions:RandomExpr",
        "ray.data.expressions:UDFExpr",
        "ray.data.expressions:UUIDExpr",
        "ray.data:RandomSeedConfig",
        "ray.data:DataContext.current",
    ),
)
