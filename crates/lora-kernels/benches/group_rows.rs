//! Grouping of rows on the host: what a step costs before its first layer.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lora_kernels::host::HostBackend;
use lora_kernels::testing::Rng;
use lora_kernels::testing::correctness::Routing;
use lora_kernels::{DeviceBuffer, Grouping, RowGroups, RowGroupsSpec, Stream};
use std::sync::Arc;

fn group_rows(c: &mut Criterion) {
    let backend = Arc::new(HostBackend::new());
    let mut group = c.benchmark_group("group_rows");
    for (rows, entries) in [(64, 64), (1024, 64), (8192, 4), (8192, 4096)] {
        let slots = Routing::Anywhere.row_slots(&mut Rng::new(1), rows, entries);
        let spec = RowGroupsSpec::new(rows as u32, entries, 48);
        let mut groups = RowGroups::new(backend.clone(), spec).expect("groups");
        let buffer = DeviceBuffer::from_slice(backend.clone(), &slots).expect("slots");
        let view = buffer.row_slots(rows).expect("slots");
        let mut build = || groups.build(&*backend, Stream::OWN, view).expect("build");
        build();
        group.throughput(Throughput::Elements(rows as u64));
        let id = BenchmarkId::new(format!("{rows}rows"), format!("{entries}entries"));
        group.bench_function(id, |b| b.iter(&mut build));
        let built = groups.download().expect("download");
        assert!(built == Grouping::of_rows(&slots, entries, 48));
    }
}

criterion_group!(benches, group_rows);
criterion_main!(benches);
