//! A delta on an engine's own context, stream and memory, and on the host where there is no GPU:
//! `cargo run -p lora-kernels --example own_context`.
mod launch;

use cudarc::driver::{CudaContext, DevicePtr as _, DevicePtrMut as _, sys};
use launch::{K, RANK, ROWS, launch};
use lora_kernels::{Stream, cuda::CudaBackend, host::HostBackend};
use lora_weights::device::{DeviceMemory as _, DevicePtr};
use std::{error::Error, sync::Arc};

const ONE: u16 = 0x3f80; // BF16

fn on_cuda(context: &Arc<CudaContext>) -> Result<Vec<u16>, Box<dyn Error>> {
    let stream = context.new_stream()?;
    let x = stream.clone_htod(&[ONE; ROWS * K])?;
    let (a, b) = (
        stream.clone_htod(&[ONE; RANK * K])?,
        stream.clone_htod(&[ONE; K * RANK])?,
    );
    let mut out = stream.alloc_zeros::<u16>(ROWS * K)?;
    // SAFETY: the caller's context outlives the backend, which ends in this function.
    let backend = unsafe { CudaBackend::with_context(context.cu_ctx() as u64)? };
    // SAFETY: a stream of that context, alive until after the only launch on it.
    let on = unsafe { Stream::from_raw(stream.cu_stream() as u64) };
    let [x, a, b] = [&x, &a, &b].map(|slice| DevicePtr(slice.device_ptr(&stream).0));
    let written = DevicePtr(out.device_ptr_mut(&stream).0);
    launch(Arc::new(backend), on, (x, written), (a, b))?;
    Ok(stream.clone_dtoh(&out)?)
}

fn on_host() -> Result<Vec<u16>, Box<dyn Error>> {
    let backend = Arc::new(HostBackend::new());
    let filled = |elements: usize, value: u16| {
        let at = backend.alloc_zeroed(elements as u64 * 2)?;
        let values = vec![value; elements];
        backend
            .upload_blocking(at, bytemuck::cast_slice(&values))
            .map(|()| at)
    };
    let (x, out) = (filled(ROWS * K, ONE)?, filled(ROWS * K, 0)?);
    let (a, b) = (filled(RANK * K, ONE)?, filled(K * RANK, ONE)?);
    launch(backend.clone(), Stream::OWN, (x, out), (a, b))?;
    let mut rows = vec![0_u16; ROWS * K];
    backend.download(out, bytemuck::cast_slice_mut(&mut rows))?;
    Ok(rows)
}

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: this looks for the driver's library and calls nothing in it.
    let driver = unsafe { sys::is_culib_present() };
    let (place, rows) = match driver.then(|| CudaContext::new(0)) {
        Some(Ok(context)) => ("a GPU", on_cuda(&context)?),
        _ => ("the host", on_host()?),
    };
    println!("on {place}: {:#06x} each", rows[0]);
    assert_eq!(rows, [0x4300; ROWS * K]); // 0.5 * 16 * 16 = 128
    Ok(())
}
